"""Our own checkpoint form: what is saved loads again, anywhere, offline, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import environment
from transformers import AutoModelForCausalLM, LlamaConfig

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone
from llm2vec_gen_st.base_reference import BaseModelError
from llm2vec_gen_st.checkpoints import card, hub, loading, registry
from llm2vec_gen_st.checkpoints.loading import load_checkpoint
from llm2vec_gen_st.checkpoints.registry import KNOWN_MODELS, KnownModel, find_known
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.lora import add_lora, lora_parameters, remove_lora
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.testing import saved_base, tiny_backbone, tiny_model

TEXTS = ["where do polar bears live?", "", "rivers " * 400, "<|im_end|> honey 🐝"]
ROOT = Path(__file__).parent.parent

# Nothing may reach the network or wait for a user.
BLOCKED = """
import builtins, socket, sys
def refuse(*args, **kwargs): raise AssertionError("blocked")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
builtins.input = refuse
"""


def run(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, without a network and without a user."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": str(ROOT), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM2VecGen, Path]:
    """A student on a base model in a local directory, and where it is saved."""
    folder = tmp_path_factory.mktemp("saved")
    base = saved_base(folder / "base")
    model = LLM2VecGen.from_base(
        load_backbone(str(base)), thought_tokens=4, compression_tokens=4, embedding_dim=48, normalize=True, device="cpu"
    )
    model.prompts["query"] = "Answer this: "
    model.default_prompt_name = "document"
    model.similarity_fn_name = "dot"
    model.save_pretrained(str(folder / "student"))
    return model, folder / "student"


def copy_of(folder: Path, target: Path) -> Path:
    for source in folder.rglob("*"):
        if source.is_file():
            place = target / source.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.read_bytes())
    return target


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    content.update(changes)
    path.write_text(json.dumps(content), "utf-8")


LOAD_AND_ENCODE = """
import json, numpy
texts = json.loads(sys.argv[2])
model = {load}
ways = model.encode, model.encode_query, model.encode_document
numpy.save(sys.argv[3], numpy.concatenate([encode(texts) for encode in ways]))
"""


@pytest.mark.parametrize(
    "load",
    [
        "__import__('llm2vec_gen_st').LLM2VecGen(sys.argv[1], device='cpu')",
        "__import__('sentence_transformers').SentenceTransformer(sys.argv[1], trust_remote_code=True, device='cpu')",
    ],
    ids=["LLM2VecGen", "SentenceTransformer"],
)
def test_a_new_offline_process_gives_the_same_vectors(saved: Any, tmp_path: Path, load: str) -> None:
    model, folder = saved
    done = run(LOAD_AND_ENCODE.format(load=load), str(folder), json.dumps(TEXTS), str(tmp_path / "vectors.npy"))
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "vectors.npy")
    wanted = np.concatenate([model.encode(TEXTS), model.encode_query(TEXTS), model.encode_document(TEXTS)])
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_settings_are_saved_and_arguments_win(saved: Any) -> None:
    model, folder = saved
    again = LLM2VecGen(str(folder), device="cpu")
    assert again.prompts == model.prompts
    assert (again.default_prompt_name, again.similarity_fn_name) == ("document", "dot")
    again = LLM2VecGen(str(folder), device="cpu", prompts={"query": "mine"}, similarity_fn_name="cosine")
    assert (again.prompts["query"], again.similarity_fn_name) == ("mine", "cosine")


def test_plain_constructor_is_told_what_to_do(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own error names the flag; where our package is missing, its requirement names all three ways."""
    _, folder = saved
    with pytest.raises(ValueError, match="trust_remote_code=True") as refused:
        SentenceTransformer(str(folder))
    assert "llm2vec_gen_st" in str(refused.value)
    for way in ("LLM2VecGen('path/to/this/folder')", "trust_remote_code=True", "export_native"):
        assert way in (folder / "README.md").read_text("utf-8")

    monkeypatch.setattr(card.importlib.metadata, "version", lambda _: "0.1.0")
    model = tiny_model()
    model.save_pretrained(str(tmp_path))
    real = environment.get_installed_version
    monkeypatch.setattr(
        environment, "get_installed_version", lambda name: None if name == card.DISTRIBUTION else real(name)
    )
    for flag in (False, True):
        with pytest.raises(ImportError) as missing:
            SentenceTransformer(str(tmp_path), trust_remote_code=flag)
        for way in ("pip install", "LLM2VecGen(path)", "trust_remote_code=True", "export_native"):
            assert way in str(missing.value)


def test_model_card_describes_the_student_and_holds_no_local_path(saved: Any) -> None:
    model, folder = saved
    text = (folder / "README.md").read_text("utf-8")
    assert text.startswith("---\nlibrary_name: sentence-transformers\n")
    assert f"fingerprint {model.backbone.reference.fingerprint}" in text
    assert "4 thought + 4 compression tokens" in text
    assert str(folder.parent) not in text
    assert str(Path.home()) not in text
    assert "base_model: " not in text


def test_model_card_names_a_base_model_on_the_hub(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    reference = type(backbone.reference)("Qwen/Qwen3-4B", "abc", backbone.reference.fingerprint)
    model = tiny_model(backbone=Backbone(backbone.llm, backbone.tokenizer, reference))
    model.save_pretrained(str(tmp_path), model_name="me/my-student")
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "base_model: Qwen/Qwen3-4B\n" in text
    assert "LLM2VecGen('me/my-student')" in text


@pytest.mark.parametrize("file", ["suffix.safetensors", "1_ResponseHead/model.safetensors"])
@pytest.mark.parametrize("change", ["missing", "extra", "renamed", "misshapen"])
def test_wrong_tensors_are_named(saved: Any, tmp_path: Path, file: str, change: str) -> None:
    folder = copy_of(saved[1], tmp_path / "student")
    tensors = load_file(folder / file)
    name = sorted(tensors)[0]
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["surplus"] = torch.zeros(1)
    elif change == "renamed":
        tensors["other"] = tensors.pop(name)
    else:
        tensors[name] = tensors[name][1:].clone()
    save_file(tensors, folder / file)
    wanted = {"missing": [f"{name!r} is missing"], "extra": ["'surplus' is not known"]}
    wanted["renamed"] = [f"{name!r} is missing", "'other' is not known"]
    wanted["misshapen"] = [f"{name!r} has shape"]
    with pytest.raises(CheckpointError) as error:
        LLM2VecGen(str(folder))
    for words in [*wanted[change], Path(file).name]:
        assert words in str(error.value)


def test_missing_and_broken_files_are_named(saved: Any, tmp_path: Path) -> None:
    folder = copy_of(saved[1], tmp_path / "student")
    (folder / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json could not be read as JSON"):
        LLM2VecGen(str(folder))
    folder = copy_of(saved[1], tmp_path / "other")
    (folder / "suffix.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"suffix\.safetensors could not be read"):
        LLM2VecGen(str(folder))
    (folder / "suffix.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"suffix\.safetensors is missing"):
        LLM2VecGen(str(folder))


def test_another_base_model_is_refused_with_both_fingerprints(saved: Any, tmp_path: Path) -> None:
    model, source = saved
    other = tiny_backbone(seed=1)
    with pytest.raises(BaseModelError) as error:
        LLM2VecGen(str(source), backbone=other)
    for reference in (model.backbone.reference, other.reference):
        assert str(reference.fingerprint) in str(error.value)
    assert LLM2VecGen(str(source), backbone=other, verify_base=False).llm is other.llm


def test_a_base_directory_may_move_with_the_checkpoint(saved: Any, tmp_path: Path) -> None:
    model, source = saved
    folder = copy_of(source, tmp_path / "student")
    saved_base(tmp_path / "base")
    base = json.loads((folder / "suffix_config.json").read_text("utf-8"))["base"]
    assert Path(base["id"]).is_absolute()
    edit_json(folder / "suffix_config.json", base={**base, "id": "../base"})
    np.testing.assert_allclose(LLM2VecGen(str(folder), device="cpu").encode(TEXTS), model.encode(TEXTS), atol=1e-6)


def test_checkpoint_size_does_not_grow_with_the_base_model(tmp_path: Path) -> None:
    sizes = []
    for layers in (1, 8):
        config = LlamaConfig(
            vocab_size=320 * layers,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        folder = tmp_path / str(layers)
        tiny_model(backbone=tiny_backbone(config)).save_pretrained(str(folder))
        sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    assert abs(sizes[0] - sizes[1]) < 256
    assert sizes[0] < 100_000


def test_lora_is_saved_with_the_student(tmp_path: Path) -> None:
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}
    model = LLM2VecGen.from_base(tiny_backbone(), embedding_dim=48, device="cpu", lora=lora)
    plain = model.encode(TEXTS)
    for parameter in lora_parameters(model.llm).values():
        torch.nn.init.normal_(parameter, std=0.1)
    assert np.abs(model.encode(TEXTS) - plain).max() > 1e-3
    model.save_pretrained(str(tmp_path))
    again = LLM2VecGen(str(tmp_path), backbone=tiny_backbone(), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), model.encode(TEXTS), atol=1e-6)
    path = tmp_path / "lora.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        LLM2VecGen(str(tmp_path), backbone=tiny_backbone())


def test_lora_stays_in_float32_on_a_bfloat16_base(tmp_path: Path) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    backbone = tiny_backbone()
    backbone.llm.to(torch.bfloat16)
    model = LLM2VecGen.from_base(backbone, embedding_dim=48, device="cpu", lora=lora)
    assert {parameter.dtype for parameter in lora_parameters(model.llm).values()} == {torch.float32}
    assert model.encode(TEXTS).dtype == np.float32


LOAD_ALL = """
import json
from llm2vec_gen_st import LLM2VecGen
for name in sys.argv[1:]:
    try:
        LLM2VecGen(name, revision="v7")
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.mark.parametrize("offline", ["1", "0"])
def test_what_is_missing_is_named_at_once(saved: Any, tmp_path: Path, offline: str) -> None:
    folder = copy_of(saved[1], tmp_path / "student")
    base = {"id": "nobody/no-such-model", "revision": "abc123", "fingerprint": "f"}
    edit_json(folder / "suffix_config.json", base=base)
    names = [str(folder), "nobody/no-such-student", "llm2vec-gen-qwen3-4b", "no/such/path"]
    done = run(LOAD_ALL, *names, HF_HUB_OFFLINE=offline, TRANSFORMERS_OFFLINE=offline)
    assert done.returncode == 0, done.stderr
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kind for kind, _ in errors] == ["BaseModelError"] + ["CheckpointError"] * 3
    assert errors[0][1].startswith("The base model 'nobody/no-such-model' (revision abc123) could not be loaded")
    assert errors[1][1].startswith("'nobody/no-such-student' (revision v7)")
    assert errors[2][1].startswith("'llm2vec-gen-qwen3-4b' stands for 'McGill-NLP/LLM2Vec-Gen-Qwen3-4B' (revision v7)")
    assert errors[3][1].startswith("'no/such/path' (revision v7)")
    assert all("llm2vec-gen-smollm2-135m" in text for _, text in errors[1:])


def test_code_of_a_base_model_is_refused_and_never_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, transformers waits for an answer on stdin before it runs a model's own code."""

    def ask(*_: Any) -> str:
        raise AssertionError("asked on stdin")

    monkeypatch.setattr("builtins.input", ask)
    base = saved_base(tmp_path / "base")
    edit_json(
        base / "config.json",
        model_type="unheard-of",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    (base / "code.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(BaseModelError, match="trust_remote_code=True") as error:
        load_backbone(str(base))
    assert "asked on stdin" not in str(error.value)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}])
def test_encodes_and_decodes_as_loaded(saved: Any, options: dict[str, Any]) -> None:
    model = LLM2VecGen(str(saved[1]), model_kwargs=options)
    assert model.llm.dtype == torch.bfloat16
    vectors = model.encode(TEXTS)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    wanted = saved[0].encode(TEXTS)
    assert ((vectors * wanted).sum(1) > 0.98).all()
    assert len(model.decode(model.encode_soft_prompts(TEXTS), max_new_tokens=4)) == len(TEXTS)


def test_the_base_weights_are_loaded_once_and_shared(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        calls.append(real(*args, **kwargs))
        return calls[-1]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    model = LLM2VecGen(str(saved[1]), device="cpu")
    assert len(calls) == 1
    assert model.llm is calls[0]
    assert model.suffix_transformer.llm is model.backbone.llm is calls[0]
    second = LLM2VecGen(str(saved[1]), device="cpu", backbone=model.backbone)
    assert len(calls) == 1
    assert second.llm is model.llm
    counted = sum(parameter.numel() for parameter in model.parameters())
    parts = [*model.llm.parameters(), model.suffix_transformer.suffix, *model.response_head.parameters()]
    assert counted == sum(parameter.numel() for parameter in parts)


def test_hub_options_hold_for_the_base_model_too(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    real = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        asked.update(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    official = Path(__file__).parent / "fixtures" / "parity" / "llama" / "official"
    for folder in (saved[1], official):
        asked.clear()
        LLM2VecGen(str(folder), token="secret", cache_folder=str(saved[1]), local_files_only=True, device="cpu")
        assert (asked["token"], asked["cache_dir"], asked["local_files_only"]) == ("secret", str(saved[1]), True)


def test_directories_that_are_no_student_say_so(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither modules\.json .* nor encoder/adapter_config\.json"):
        LLM2VecGen(str(tmp_path))
    folder = copy_of(saved[1], tmp_path / "student")
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    (folder / "modules.json").write_text(json.dumps([*modules, {**modules[1], "type": "os.path.Evil", "path": "3_E"}]))
    with pytest.raises(CheckpointError, match=r"os\.path\.Evil belongs to another package"):
        LLM2VecGen(str(folder))
    (folder / "modules.json").write_text(json.dumps([modules[0], {**modules[1], "path": "../elsewhere"}]))
    with pytest.raises(CheckpointError, match="leaves the checkpoint"):
        LLM2VecGen(str(folder))


def test_names_stand_for_base_models_and_checkpoints() -> None:
    assert len({model.name for model in KNOWN_MODELS}) == len(KNOWN_MODELS)
    for model in KNOWN_MODELS:
        assert (model.hub_id is None) != (model.folder is None)
    known = find_known("LLM2Vec-Gen-Qwen3-0.6B")
    assert known is not None
    assert known.hub_id == "McGill-NLP/LLM2Vec-Gen-Qwen3-06B"
    assert known.base_id == "Qwen/Qwen3-0.6B"
    assert known.teacher_adapters is not None
    assert known.teacher_adapters[1] == "McGill-NLP/LLM2Vec-Qwen3-06B-mntp-unsup-simcse"
    assert find_known("somewhere/else") is None


def test_a_name_of_the_paper_is_fetched_without_pickles(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, id=repo_id)
        return str(saved[1])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    load_checkpoint("llm2vec-gen-llama3.2-1b", LoadOptions(revision="v2", local_files_only=True))
    assert asked["id"] == "McGill-NLP/LLM2Vec-Gen-Meta-Llama-32-1B-Instruct"
    assert (asked["revision"], asked["local_files_only"]) == ("v2", True)
    names = ["optimizer.pt", "training_args.bin", "rng_state.pth", "model.safetensors", "model-00001-of-2.safetensors"]
    from huggingface_hub.utils import filter_repo_objects

    assert list(filter_repo_objects(names, allow_patterns=hub._FILES)) == []
    wanted = ["modules.json", "encoder/adapter_model.safetensors", "alignment_mlp", "1_ResponseHead/model.safetensors"]
    assert list(filter_repo_objects(wanted, allow_patterns=hub._FILES)) == wanted


def test_a_built_in_model_is_only_warned_about_its_base_without_the_package(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The packaged base model has 4-bit weights, the hub's has not: close, not the same."""
    folder = copy_of(saved[1], tmp_path / "llm2vec-gen-smollm2-135m")
    base = json.loads((folder / "suffix_config.json").read_text("utf-8"))["base"]
    edit_json(folder / "suffix_config.json", base={**base, "fingerprint": "0" * 16})
    monkeypatch.setattr(registry, "PRETRAINED", tmp_path)
    with pytest.raises(BaseModelError):
        load_checkpoint("llm2vec-gen-smollm2-135m", LoadOptions())
    monkeypatch.setattr(loading, "packaged_smollm2", lambda: None)
    load_checkpoint("llm2vec-gen-smollm2-135m", LoadOptions())
    assert "0" * 16 in caplog.text
    with pytest.raises(CheckpointError, match="not part of this installation"):
        load_checkpoint("llm2vec-gen-smollm2-135m-self", LoadOptions())
    assert KnownModel("a", SMOLLM2_ID).folder == tmp_path / "a"


LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}
CONFIGS = ("suffix_config.json", "1_ResponseHead/config.json")


@pytest.fixture(scope="module")
def saved_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved student with LoRA layers on the tiny base model."""
    folder = tmp_path_factory.mktemp("lora")
    LLM2VecGen.from_base(
        tiny_backbone(), thought_tokens=4, compression_tokens=4, embedding_dim=48, device="cpu", lora=LORA
    ).save_pretrained(str(folder))
    return folder


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-1, 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def changed_configs(draw: st.DrawFn) -> tuple[str, Any]:
    """One of the two configs of a student, a change at some place of it, and what is written there."""
    file = draw(st.sampled_from(CONFIGS))
    places = {
        CONFIGS[0]: [
            *([key] for key in ("format_version", "base", "thought_tokens", "compression_tokens", "max_seq_length")),
            *([key] for key in ("end_of_response", "end_of_text_ids", "lora", "surplus")),
            *(["base", key] for key in ("id", "revision", "fingerprint", "embedding_sample", "surplus")),
            *(["lora", key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules", "surplus")),
        ],
        CONFIGS[1]: [[key] for key in ("hidden_size", "embedding_dim", "reconstruction", "alignment", "surplus")],
    }
    place = draw(st.sampled_from(places[file]))
    names = st.lists(st.sampled_from(["q_proj", "layers", "embed_tokens", "norm", "lm_head"]), max_size=2)
    return file, (place, draw(st.just("delete") | st.tuples(json_values | names)))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed_configs())
@example((CONFIGS[0], (["lora", "target_modules"], (["embed_tokens", "norm"],))))
@example((CONFIGS[0], (["lora", "target_modules"], (["embed_tokens", "q_proj"],))))
def test_a_changed_config_loads_or_is_refused_by_name(saved_lora: Path, backbone: Backbone, changed: Any) -> None:
    file, (place, value) = changed
    path = saved_lora / file
    kept = path.read_text("utf-8")
    content = json.loads(kept)
    parent = content[place[0]] if len(place) == 2 else content
    if value == "delete":
        parent.pop(place[-1], None)
    else:
        parent[place[-1]] = value[0]
    path.write_text(json.dumps(content), "utf-8")
    refused: Exception | None = None
    try:
        LLM2VecGen(str(saved_lora), backbone=backbone, device="cpu")
    except (CheckpointError, BaseModelError) as error:
        refused = error
    else:
        if hasattr(backbone.llm, "peft_config"):
            remove_lora(backbone.llm)
    finally:
        path.write_text(kept, "utf-8")
    if isinstance(refused, CheckpointError):
        # Sizes that are right by themselves are found wrong where the tensors are.
        files = (path, *(saved_lora / name for name in ("suffix.safetensors", "lora.safetensors")))
        assert any(str(name) in str(refused) for name in (*files, saved_lora / "1_ResponseHead" / "model.safetensors"))
    assert not [name for name, _ in backbone.llm.named_modules() if "lora" in name]


@pytest.mark.parametrize("file", CONFIGS)
def test_missing_and_unknown_keys_of_a_config_are_named(saved: Any, tmp_path: Path, file: str) -> None:
    folder = copy_of(saved[1], tmp_path / "student")
    path = folder / file
    content = json.loads(path.read_text("utf-8"))
    name = sorted(content)[0]
    content["surplus"] = 1
    del content[name]
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(CheckpointError) as error:
        LLM2VecGen(str(folder))
    for words in (str(path), f"the key {name!r} is missing", "the key 'surplus' is not known"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    "targets", [["embed_tokens"], ["q_proj", "embed_tokens"], ["lm_head"], ["norm"], ["embed_tokens", "norm"]]
)
def test_lora_layers_that_could_not_be_saved_are_refused(targets: list[str]) -> None:
    backbone = tiny_backbone()
    modules = dict(backbone.llm.named_modules())
    with pytest.raises(ValueError, match=rf"{targets[-1]}|RMSNorm"):
        add_lora(backbone.llm, {"r": 2, "lora_alpha": 4, "target_modules": targets})
    assert dict(backbone.llm.named_modules()) == modules
    assert not hasattr(backbone.llm, "peft_config")


@pytest.mark.parametrize("broken", ["lora.safetensors", "1_ResponseHead/model.safetensors", "device", "target"])
def test_a_failed_load_leaves_a_shared_backbone_as_it_was(saved_lora: Path, tmp_path: Path, broken: str) -> None:
    folder = copy_of(saved_lora, tmp_path / "student")
    backbone = tiny_backbone()
    ids = torch.arange(3, 40)[None]
    modules = dict(backbone.llm.named_modules())
    parameters = {name: (value, value.requires_grad) for name, value in backbone.llm.named_parameters()}
    with torch.no_grad():
        before = backbone.llm(ids).logits
    device = "cpu"
    if broken == "device":
        device = "no-such-device"
    elif broken == "target":
        edit_json(folder / "suffix_config.json", lora={**LORA, "target_modules": ["q_proj", "layers"]})
    else:
        tensors = load_file(folder / broken)
        save_file(dict(list(tensors.items())[1:]), folder / broken)
    with pytest.raises((ValueError, RuntimeError)):
        LLM2VecGen(str(folder), backbone=backbone, device=device)
    assert {name: id(module) for name, module in backbone.llm.named_modules()} == {
        name: id(module) for name, module in modules.items()
    }
    for name, value in backbone.llm.named_parameters():
        assert value is parameters[name][0]
        assert value.requires_grad == parameters[name][1]
    assert not hasattr(backbone.llm, "peft_config")
    with torch.no_grad():
        assert torch.equal(backbone.llm(ids).logits, before)
    again = LLM2VecGen(str(saved_lora), backbone=backbone, device="cpu")
    assert lora_parameters(again.llm)


def test_a_failed_load_leaves_the_lora_layers_of_the_student_before_it(saved_lora: Path) -> None:
    first = LLM2VecGen(str(saved_lora), backbone=tiny_backbone(), device="cpu")
    vectors = first.encode(TEXTS)
    with pytest.raises(ValueError, match="already carries the LoRA layers of another student"):
        LLM2VecGen(str(saved_lora), backbone=first.backbone, device="cpu")
    np.testing.assert_array_equal(first.encode(TEXTS), vectors)


def test_truncated_width_and_prompts_taken_away_come_back(tmp_path: Path) -> None:
    saved_base(tmp_path / "base")
    model = LLM2VecGen.from_base(str(tmp_path / "base"), embedding_dim=48, device="cpu")
    model.truncate_dim = 16
    model.prompts = {}
    model.save_pretrained(str(tmp_path / "saved"))
    ours = LLM2VecGen(str(tmp_path / "saved"), device="cpu")
    host = SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True, device="cpu")
    assert ours.encode_query("a").shape == host.encode_query("a").shape == (16,)
    np.testing.assert_allclose(ours.encode_query("a"), host.encode_query("a"), atol=1e-6)
    assert LLM2VecGen(str(tmp_path / "saved"), truncate_dim=8, device="cpu").encode("a").shape == (8,)


def test_a_length_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.max_seq_length = 8
    for act in (lambda: model.encode("bees"), lambda: model.save_pretrained(str(tmp_path / "saved"))):
        with pytest.raises(ValueError, match="max_seq_length 8 leaves no room for text beside 8 suffix tokens"):
            act()


def test_a_backend_that_it_does_not_run_on_is_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match="there is no backend 'onnx'"):
        LLM2VecGen("llm2vec-gen-smollm2-135m", backend="onnx")
