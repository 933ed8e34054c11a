"""A student on a quantized base model: loaded once, as it is, and still known to be the right base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import load_backbone
from llm2vec_gen_st.base_reference import BaseModelError, BaseReference, check_base, embedding_sample, fingerprint
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.testing import saved_base, tiny_backbone

TEXTS = ["where do polar bears live?", "", "bees make honey " * 30]


def int8() -> dict[str, Any]:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    return {"quantization_config": TorchAoConfig(torchao.Int8WeightOnlyConfig())}


def linear_weights(llm: nn.Module) -> list[torch.Tensor]:
    linear = {name: module for name, module in llm.named_modules() if isinstance(module, nn.Linear)}
    return [module.weight for name, module in linear.items() if name != "lm_head"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM2VecGen, Path]:
    """A float32 student, and where it is saved."""
    folder = tmp_path_factory.mktemp("quantized")
    base = load_backbone(str(saved_base(folder / "base")))
    model = LLM2VecGen.from_base(base, thought_tokens=4, compression_tokens=4, embedding_dim=48, device="cpu")
    model.save_pretrained(str(folder / "student"))
    return model, folder / "student"


@pytest.fixture(scope="module")
def quantized(exact: tuple[LLM2VecGen, Path]) -> LLM2VecGen:
    return LLM2VecGen(str(exact[1]), model_kwargs=int8())


def test_linear_layers_are_really_int8(exact: Any, quantized: LLM2VecGen) -> None:
    weights = linear_weights(quantized.llm)
    assert len(weights) == 14
    for weight, original in zip(weights, linear_weights(exact[0].llm), strict=True):
        assert type(weight).__name__ == "Int8Tensor"
        assert weight.qdata.dtype == torch.int8
        assert weight.qdata.nbytes * 4 == original.nbytes
    assert type(quantized.llm.get_input_embeddings().weight) is nn.Parameter


def test_encodes_and_decodes_close_to_float32(exact: Any, quantized: LLM2VecGen) -> None:
    wanted, found = exact[0].encode(TEXTS), quantized.encode(TEXTS)
    assert found.dtype == np.float32
    cosines = (wanted * found).sum(1) / np.linalg.norm(wanted, axis=1) / np.linalg.norm(found, axis=1)
    assert (cosines > 0.98).all()
    assert not np.array_equal(wanted, found)
    prompts = quantized.encode_soft_prompts(TEXTS)
    torch.testing.assert_close(prompts, exact[0].encode_soft_prompts(TEXTS), atol=0.1, rtol=0)
    assert len(quantized.decode(prompts, max_new_tokens=4)) == len(TEXTS)


def test_suffix_and_heads_learn_on_a_quantized_llm(exact: Any) -> None:
    model = LLM2VecGen(str(exact[1]), model_kwargs=int8())
    query = model.preprocess(TEXTS)
    response = pad_right(model.suffix_transformer.response_ids(["On the ice.", "a", "Bees."], 20))
    loss = sum(LLM2VecGenLoss(model)([query, response], torch.ones(3, 48)).values())
    assert torch.isfinite(loss)
    loss.backward()
    trained = [model.suffix_transformer.suffix, *model.response_head.parameters()]
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in trained)
    assert all(parameter.grad is None for parameter in model.llm.parameters())


def test_base_weights_are_loaded_once(exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    real = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        loaded.append(real(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    model = LLM2VecGen(str(exact[1]), model_kwargs=int8())
    assert len(loaded) == 1
    assert model.llm is model.backbone.llm is loaded[0]


def test_a_quantized_copy_is_accepted_and_another_base_model_is_not(
    exact: Any, quantized: LLM2VecGen, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = quantized.backbone.reference
    assert found.fingerprint is None
    assert found.embedding_sample == exact[0].backbone.reference.embedding_sample
    caplog.clear()
    check_base(exact[0].backbone.reference, found)
    assert caplog.text == ""
    other = load_backbone(str(saved_base(tmp_path / "other", tiny_backbone(seed=1))), model_kwargs=int8())
    with pytest.raises(BaseModelError, match="input embeddings differ") as error:
        LLM2VecGen(str(exact[1]), backbone=other)
    assert str(tmp_path / "other") in str(error.value)
    assert LLM2VecGen(str(exact[1]), backbone=other, verify_base=False).llm is other.llm
    # Checkpoints written before the sample was taken can only be warned about.
    check_base(BaseReference("a", None, "f" * 16), found)
    assert "f" * 16 in caplog.text


def test_a_student_saved_from_a_quantized_llm_still_knows_its_base_model(
    exact: Any, quantized: LLM2VecGen, tmp_path: Path
) -> None:
    quantized.save_pretrained(str(tmp_path))
    again = LLM2VecGen(str(tmp_path), backbone=exact[0].backbone, device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), exact[0].encode(TEXTS), atol=1e-6)
    with pytest.raises(BaseModelError):
        LLM2VecGen(str(tmp_path), backbone=tiny_backbone(seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_base_model_is_recognised_in_every_dtype(dtype: torch.dtype) -> None:
    llm = tiny_backbone().llm
    expected = BaseReference.of(llm, "a")
    llm.to(dtype)
    assert (fingerprint(llm) == expected.fingerprint) == (dtype != torch.float16)
    check_base(expected, BaseReference("b", None, None, embedding_sample(llm)))
    with pytest.raises(BaseModelError):
        check_base(expected, BaseReference.of(tiny_backbone(seed=1).llm.to(dtype), "b"))
