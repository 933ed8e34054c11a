"""The command `evaluate`, on a tiny student saved to disk and on one of another kind."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner, Result

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines import BASELINES, answers
from llm2vec_gen_st.baselines.echo import EchoLLM, echo
from llm2vec_gen_st.baselines.gircse import GIRCSELLM
from llm2vec_gen_st.baselines.llm_module import encoder_of
from llm2vec_gen_st.baselines.pooling import LastTokenLLM
from llm2vec_gen_st.checkpoints import export_native
from llm2vec_gen_st.cli import app
from llm2vec_gen_st.evaluation import read_results
from llm2vec_gen_st.evaluation.loading import load_model
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.testing import saved_base


@pytest.fixture
def saved(student: LLM2VecGen, tmp_path: Path) -> Path:
    """Two models on disk: a native export and a model that has nothing to do with students."""
    export_native(student, tmp_path / "native")
    return tmp_path


@pytest.fixture
def base(backbone: Backbone, tmp_path: Path) -> Path:
    """A base LLM on disk."""
    return saved_base(tmp_path / "base", backbone)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_models_are_evaluated_compared_and_named(saved: Path, folder: Path) -> None:
    options = ["--tasks", folder / "sts", "--output", saved / "out", "--dtype", "float32"]
    first = run(saved / "native", *options)
    assert first.exit_code == 0, first.output
    assert "| sts | cosine_spearman |" in first.output
    (saved / "mine.json").write_text('{"sts": "Say again:"}')
    second = run(
        saved / "native", *options, "--name", "other", "--baseline", "native", "--instructions", saved / "mine.json"
    )
    assert second.exit_code == 0, second.output
    assert "| task | metric | native | other |" in second.output
    found = {result.name: result.instructions for result in read_results(saved / "out")}
    assert found == {"native": {"text": ""}, "other": {"text": "Say again: "}}


def test_several_tasks_may_be_separated_by_commas(saved: Path, folder: Path) -> None:
    done = run(saved / "native", "--tasks", f"{folder / 'sts'},{folder / 'pairs'}", "--output", saved / "out")
    assert done.exit_code == 0, done.output
    assert {result.task_name for result in read_results(saved / "out")} == {"sts", "pairs"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "STS99"], "'STS99' is no group"),
        (["--tasks", "STS12", "--baseline", "teacher"], "'teacher' has no results"),
        (["--tasks", "STS12", "--instructions", "nowhere.json"], "nowhere.json: there is no such file"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(tmp_path: Path, options: list[str], said: str) -> None:
    done = run("no-such-model", *options, "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_failed_tasks_are_one_sentence(saved: Path, folder: Path) -> None:
    (folder / "sts" / "test.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "score": "high"}\n')
    done = run(saved / "native", "--tasks", folder / "sts", "--output", saved / "out")
    assert done.exit_code == 1
    assert "1 of 1 tasks failed: sts" in " ".join(done.stderr.split())


def test_a_folder_of_stock_modules_is_a_plain_model_and_a_broken_one_is_refused(saved: Path) -> None:
    assert type(load_model(str(saved / "native"))) is SentenceTransformer
    (saved / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_model(str(saved / "empty"))


def test_students_and_baselines_are_known_by_their_folders(base: Path, tmp_path: Path) -> None:
    LLM2VecGen.from_base(str(base), embedding_dim=8, device="cpu").save_pretrained(str(tmp_path / "student"))
    assert isinstance(load_model(str(tmp_path / "student")), LLM2VecGen)
    echo(str(base), device="cpu").save_pretrained(str(tmp_path / "echo"))
    loaded = load_model(str(tmp_path / "echo"))
    assert type(loaded) is SentenceTransformer
    assert type(loaded[0]) is EchoLLM


@pytest.mark.parametrize("name", ["mean", "last", "echo", "llm2vec", "inbedder", "gircse"])
def test_baselines_are_evaluated_by_name_as_their_saved_selves_are(
    name: str, base: Path, folder: Path, tmp_path: Path
) -> None:
    options = ["--tasks", folder / "sts", "--output", tmp_path / "out", "--dtype", "float32"]
    done = run(name, "--base", base, *options)
    assert done.exit_code == 0, done.output
    assert f"| task | metric | {name} |" in done.output
    assert ("is meant to be trained" in done.output) == BASELINES[name].trained
    BASELINES[name].build(str(base), device="cpu").save_pretrained(str(tmp_path / "folder"))
    again = run(tmp_path / "folder", *options)
    assert again.exit_code == 0, again.output
    by_name, by_folder = sorted(read_results(tmp_path / "out"), key=lambda result: result.name == "folder")
    assert (by_name.name, by_folder.name) == (name, "folder")
    assert by_name.score == by_folder.score
    assert by_name.model == by_folder.model


def test_a_trained_baseline_may_be_the_base(base: Path, folder: Path, tmp_path: Path) -> None:
    lora = {"r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]}
    encoder_of(GIRCSELLM, str(base), lora=lora, soft_tokens=2, device="cpu").save_pretrained(str(tmp_path / "trained"))
    done = run("gircse", "--base", tmp_path / "trained", "--tasks", folder / "sts", "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "is meant to be trained" not in done.output
    (result,) = read_results(tmp_path / "out")
    assert result.model["modules"][0]["settings"]["soft_tokens"] == 2


def test_what_hyde_writes_is_kept_with_the_results(
    base: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ["--set", "answers=1", "--set", "temperature=0", "--set", "max_new_tokens=4"]
    command = ["hyde", "--base", base, "--tasks", folder / "sts", "--output", tmp_path / "out", *short]
    first = run(*command)
    assert first.exit_code == 0, first.output
    kept = tmp_path / "out" / "hyde-answers.sqlite"
    with closing(sqlite3.connect(kept)) as store:
        written = store.execute("SELECT query, number, tokens FROM answers").fetchall()
    assert len({query for query, _, _ in written}) == len(written) > 0
    assert all(number == 0 and tokens <= 4 for _, number, tokens in written)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("an answer was written twice")

    with monkeypatch.context() as patched:
        patched.setattr(answers, "generate_responses", never)
        again = run(*command, "--overwrite")
    assert again.exit_code == 0, again.output
    elsewhere = run(*command, "--overwrite", "--set", f"cache={tmp_path / 'elsewhere.sqlite'}")
    assert elsewhere.exit_code == 0, elsewhere.output
    assert (tmp_path / "elsewhere.sqlite").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["echo"], "'echo' is a baseline, which needs an LLM to run on"),
        (["all-MiniLM-L6-v2", "--base", "base"], "'all-MiniLM-L6-v2' is none"),
        (["all-MiniLM-L6-v2", "--set", "answers=2"], "--set goes with the name of a baseline"),
        (["hyde", "--base", "base", "--set", "answers"], "--set 'answers' is not of the form key=value"),
        (["hyde", "--base", "base", "--set", "answers=two"], "'answers' of 'hyde' must be a whole number, got 'two'"),
        (["hyde", "--base", "base", "--set", "temperature=hot"], "must be a number, got 'hot'"),
        (["echo", "--base", "base", "--set", "answers=2"], "'echo' has no option 'answers'; known are max_seq_length"),
        (["echo", "--base", "base", "--set", "prompts={}"], "'echo' has no option 'prompts'"),
    ],
)
def test_mistakes_with_baselines_are_told_before_anything_is_loaded(
    arguments: list[str], said: str, folder: Path, tmp_path: Path
) -> None:
    done = run(*arguments, "--tasks", folder / "sts", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_saved_model_goes_before_a_baseline_of_its_name(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo").mkdir()
    assert type(load_model("echo", base=str(base))[0]) is EchoLLM
    shutil.rmtree(tmp_path / "echo")
    BASELINES["last"].build(str(base), device="cpu").save_pretrained("echo")
    assert type(load_model("echo")[0]) is LastTokenLLM
    with pytest.raises(ValueError, match="a saved model of that name"):
        load_model("echo", base=str(base))


def test_help_names_every_baseline() -> None:
    printed = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "300"}).output
    listed = re.search(r"name of a baseline: ([^.]*)\.", printed)
    assert listed is not None
    assert listed[1].split(", ") == list(BASELINES)
