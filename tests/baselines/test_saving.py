"""Saved baselines come back the same, without base weights or pickles; all can be made and compared by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import BaseModelError, load_backbone
from llm2vec_gen_st.baselines import BASELINES, build, gircse, inbedder, llm2vec
from llm2vec_gen_st.baselines.gircse import GIRCSELLM
from llm2vec_gen_st.baselines.inbedder import InBedderLLM
from llm2vec_gen_st.baselines.llm2vec import LLM2VecTransformer
from llm2vec_gen_st.baselines.llm_module import LLMModule, as_sentence_transformer
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.testing import tiny_backbone

from .families import TEXTS

OPTIONS: dict[str, dict[str, Any]] = {"hyde": {"answers": 1, "max_new_tokens": 4, "temperature": 0.0}}
LORA = {"r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}


def trained(kind: type[LLMModule], folder: Path, **options: Any) -> SentenceTransformer:
    """A baseline with LoRA matrices far from zero."""
    module = kind(load_backbone(str(folder)), lora=LORA, **options)
    generator = torch.Generator().manual_seed(0)
    for parameter in lora_parameters(module.llm).values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return as_sentence_transformer(module, prompts={"query": "Who? "}, device="cpu")


@pytest.mark.parametrize("name", ["llm2vec", "inbedder", "gircse"])
def test_a_saved_one_is_built_by_name_on_a_loaded_base(name: str, tmp_path: Path) -> None:
    tiny_backbone().llm.save_pretrained(tmp_path / "base")
    model = build(name, tiny_backbone(), device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    found = build(name, tmp_path / "saved", base=tiny_backbone(), device="cpu")
    np.testing.assert_allclose(found.encode(TEXTS), model.encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize("name", list(BASELINES))
def test_every_baseline_is_made_saved_and_loaded_by_the_host(name: str, llama_folder: Path, tmp_path: Path) -> None:
    model = build(name, str(llama_folder), device="cpu", prompts={"query": "Who? "}, **OPTIONS.get(name, {}))
    expected = model.encode_query(TEXTS)
    assert expected.shape == (len(TEXTS), model.get_embedding_dimension())
    assert np.isfinite(expected).all()
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(loaded.encode_query(TEXTS), expected, atol=1e-6)
    files = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert files <= {".json", ".md"}
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 200_000


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    [
        (LLM2VecTransformer, llm2vec, {"max_seq_length": 40}),
        (InBedderLLM, inbedder, {"question": "Which place?"}),
        (GIRCSELLM, gircse, {"soft_tokens": 2, "temperature": 0.7}),
    ],
    ids=["llm2vec", "inbedder", "gircse"],
)
def test_trained_baselines_come_back_with_their_lora_and_settings(
    kind: type[LLMModule], make: Any, options: dict[str, Any], llama_folder: Path, tmp_path: Path
) -> None:
    model = trained(kind, llama_folder, **options)
    expected = model.encode_query(TEXTS)
    model.save_pretrained(str(tmp_path))
    untrained = as_sentence_transformer(kind(load_backbone(str(llama_folder)), **options), device="cpu")
    assert np.abs(untrained.encode(TEXTS, prompt="Who? ") - expected).max() > 1e-3
    np.testing.assert_allclose(make(tmp_path, device="cpu").encode_query(TEXTS), expected, atol=1e-6)
    stock = SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(stock.encode_query(TEXTS), expected, atol=1e-6)
    # On a backbone that others use, which stays as it is for them.
    backbone = load_backbone(str(llama_folder))
    ids = torch.tensor([[5, 6, 7]])
    plain = backbone.llm(ids).logits
    np.testing.assert_allclose(make(tmp_path, base=backbone, device="cpu").encode_query(TEXTS), expected, atol=1e-6)
    assert torch.equal(backbone.llm(ids).logits, plain)


def test_another_base_model_and_another_kind_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    trained(GIRCSELLM, llama_folder).save_pretrained(str(tmp_path))
    other = tiny_backbone(seed=1)
    with pytest.raises(BaseModelError, match="weights differ"):
        gircse(tmp_path, base=other)
    assert not lora_parameters(other.llm)
    with pytest.raises(CheckpointError, match="holds a GIRCSELLM, not a InBedderLLM"):
        inbedder(tmp_path)


def test_the_base_model_may_lie_inside_the_folder(llama_folder: Path, tmp_path: Path) -> None:
    model = trained(GIRCSELLM, llama_folder)
    model.save_pretrained(str(tmp_path))
    shutil.copytree(llama_folder, tmp_path / "base")
    path = tmp_path / "baseline_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base": {**config["base"], "id": "base"}}))
    np.testing.assert_allclose(gircse(tmp_path, device="cpu").encode(TEXTS), model.encode(TEXTS), atol=1e-6)


def test_broken_files_are_named(llama_folder: Path, tmp_path: Path) -> None:
    trained(GIRCSELLM, llama_folder).save_pretrained(str(tmp_path))
    path = tmp_path / "baseline_config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"soft_tokens": "5"}, "'soft_tokens' must be a whole number"),
        ({"soft_tokens": 0}, "at least 1 soft token"),
        ({"more": 1}, "the key 'more' is not known"),
        ({"format_version": 2}, "only format_version 1"),
        ({"lora": {**LORA, "r": 3}}, r"shape \(2, 64\), expected \(3, 64\)"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            gircse(tmp_path)
    path.write_text(json.dumps(config))
    (tmp_path / "lora.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lora\.safetensors is missing"):
        gircse(tmp_path)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known are mean, last, echo, hyde, llm2vec, inbedder, gircse"):
        build("ecco", tiny_backbone())
