"""What is installed and what is shipped: a core install works alone, and missing extras say how to get them."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parent.parent
OPTIONAL = ("faiss", "langchain_core", "mteb", "peft", "ray", "datasets", "accelerate", "pyarrow", "gguf", "vllm")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def build(source: Path, output: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(output.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def closure(requirements: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that a set of requirements pulls in."""
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key in seen:
                continue
            seen.add(key)
            try:
                found = importlib.metadata.distribution(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue  # CUDA packages, where torch is a CPU build
            todo.extend((Requirement(text), wanted) for text in found.requires or ())
            if not wanted:
                yield found


@pytest.fixture(scope="module")
def core_install(wheel: Path, project: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and what its core requirements pull in, and nothing else."""
    folder = tmp_path_factory.mktemp("core")
    for distribution in closure(project["dependencies"]):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path.insert(0, {str(folder)!r}); "
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", prelude + code], capture_output=True, text=True, cwd=folder
    )


def test_a_core_install_imports_encodes_and_decodes_without_any_extra(core_install: Path) -> None:
    done = run_in(
        core_install,
        "import importlib.util, llm2vec_gen_st\n"
        f"assert not [name for name in {OPTIONAL} if importlib.util.find_spec(name)]\n"
        "from llm2vec_gen_st.testing import tiny_model\n"
        "import llm2vec_gen_st.cli, llm2vec_gen_st.demo, llm2vec_gen_st.training, llm2vec_gen_st.responses\n"
        "import llm2vec_gen_st.teachers, llm2vec_gen_st.losses, llm2vec_gen_st.checkpoints\n"
        "model = tiny_model()\n"
        "assert model.encode_query(['where do polar bears live?']).shape == (1, 48)\n"
        "assert len(model.decode(['a'], max_new_tokens=2)) == 1\n"
        "print(llm2vec_gen_st.__file__)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(core_install / "llm2vec_gen_st" / "__init__.py")


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("from llm2vec_gen_st.files import read_rows; read_rows('x.parquet')", "train"),
        (
            "from pathlib import Path; from llm2vec_gen_st.files import write_rows; write_rows(Path('x.parquet'), [])",
            "train",
        ),
        ("from llm2vec_gen_st.responses import read_responses; read_responses('.')", "train"),
        (
            "from llm2vec_gen_st.responses import write_responses; write_responses(['a'], 'out', 'b', backend='vllm')",
            "vllm",
        ),
        ("import ray_llm2vec_gen; ray_llm2vec_gen.encode_corpus('a', 'x.jsonl', 'out')", "ray"),
        ("import ray_llm2vec_gen; ray_llm2vec_gen.write_responses(['a'], 'out', 'b')", "ray"),
        ("from llm2vec_gen_st.training import train; train('x.jsonl', 'out', base='none')", "train"),
        (
            "from llm2vec_gen_st.modules.lora import add_lora; import torch; "
            "add_lora(torch.nn.Linear(2, 2), dict(r=1, lora_alpha=1, target_modules=['x']))",
            "train",
        ),
    ],
)
def test_a_missing_extra_gives_the_command_that_installs_it(core_install: Path, call: str, extra: str) -> None:
    (core_install / "x.jsonl").write_text('{"query": "a", "response": "b"}\n')
    done = run_in(core_install, call)
    assert done.returncode == 1
    assert "MissingExtraError" in done.stderr
    assert f"pip install 'llm2vec-gen-st[{extra}]'" in done.stderr


def test_the_command_line_prints_a_missing_extra_as_one_sentence(core_install: Path) -> None:
    (core_install / "x.jsonl").write_text('{"query": "a", "response": "b"}\n')
    done = run_in(core_install, "from llm2vec_gen_st.cli import app; app(['train', 'x.jsonl', '-o', 'out'])")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install 'llm2vec-gen-st[train]'" in done.stderr


def test_the_wheel_holds_code_data_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    packaged = {path.relative_to(ROOT).as_posix() for path in (ROOT / "llm2vec_gen_st").rglob("*") if path.is_file()}
    assert {name for name in packaged if "__pycache__" not in name} <= set(names)
    for name in ("py.typed", "demo/passages.jsonl", "demo/questions.jsonl"):
        assert f"llm2vec_gen_st/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "llm2vec-gen = llm2vec_gen_st.cli:app" in entry
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    shipped = {path.parent.name for path in (ROOT / "integrations").glob("*/__init__.py")}
    assert top == {"llm2vec_gen_st", *shipped}


def test_packages_under_integrations_ship_under_their_own_names(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("llm2vec_gen_st", "integrations/example_llm2vec_gen"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text('__version__ = "0.1.0"\n')
    with zipfile.ZipFile(build(tmp_path, tmp_path / "dist")) as archive:
        assert {"llm2vec_gen_st/__init__.py", "example_llm2vec_gen/__init__.py"} <= set(archive.namelist())


def test_requirements_have_floors_and_only_the_host_has_a_cap(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(text for extra in extras.values() for text in extra)]:
        requirement = Requirement(text)
        operators = sorted(specifier.operator for specifier in requirement.specifier)
        assert operators == (["<", ">="] if requirement.name == "sentence-transformers" else [">="]), text
    host = next(text for text in project["dependencies"] if text.startswith("sentence-transformers"))
    assert re.search(r"<\d+$", host)


def test_the_oldest_versions_that_are_tested_are_the_floors(project: dict[str, Any]) -> None:
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}
    makefile = (ROOT / "Makefile").read_text()
    tested = re.search(r"constraints-oldest.txt \\\s*-e '\.\[(.*)\]'", makefile)
    assert tested
    extras = project["optional-dependencies"]
    floors = {}
    for text in [*project["dependencies"], *(text for extra in tested[1].split(",") for text in extras[extra])]:
        requirement = Requirement(text)
        floors[canonicalize_name(requirement.name)] = next(
            Version(each.version) for each in requirement.specifier if each.operator == ">="
        )
    assert pins == floors


def test_every_extra_that_code_asks_for_exists(project: dict[str, Any]) -> None:
    asked = {
        extra
        for folder in ("llm2vec_gen_st", "integrations")
        for path in (ROOT / folder).rglob("*.py")
        for extra in re.findall(r'extra="([\w-]+)"', path.read_text(encoding="utf-8"))
    }
    assert asked <= set(project["optional-dependencies"])


def test_constraints_pin_what_is_asked_for_within_its_range(project: dict[str, Any]) -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values())
    extras = project["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    installed = next(line for line in makefile.splitlines() if line.startswith("EXTRAS")).partition(":= ")[2].split(",")
    for text in [*project["dependencies"], *(text for extra in installed for text in extras[extra])]:
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text
    for name, version in re.findall(r"([\w-]+)==([\d.]+)", makefile):
        assert pins[canonicalize_name(name)] == version
