"""LoRA backbone: its matrices train with the student, and the plain LLM is there, bit for bit, when they are off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.modules.frozen_llm import LORA_FILE
from llm2vec_gen_st.modules.lora import lora_enabled, lora_parameters, weights_without_lora
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import train

from .tiny import TINY, rows

LORA = TINY.with_overrides({"lora_rank": 2, "lora_targets": "q_proj,down_proj", "learning_rate": 1e-2})
TEXTS = ["where do polar bears live?", "wax", "", "what is a river, and where does it go in the end?"]
IDS = torch.tensor([[5, 17, 44, 9, 120]])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM2VecGen, Path]:
    folder = tmp_path_factory.mktemp("lora")
    return train(rows(), folder, base=tiny_backbone(), recipe=LORA, max_steps=3, progress=False), folder


def test_matrices_are_trained_and_the_llm_is_not(trained: tuple[LLM2VecGen, Path]) -> None:
    model, _ = trained
    plain = tiny_backbone().llm
    matrices = lora_parameters(model.llm)
    assert len(matrices) == 2 * 2 * 2, "A and B, two layers, two targets"
    assert all(matrix.abs().max() > 0 for matrix in matrices.values()), "B starts at 0"
    found = weights_without_lora(model.llm, merge=False)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(found[name], tensor), name
    logits = model.llm(input_ids=IDS).logits
    assert torch.equal(logits, plain(input_ids=IDS).logits)
    with lora_enabled(model.llm, True):
        assert not torch.allclose(model.llm(input_ids=IDS).logits, logits, atol=1e-4)
    assert not model.llm.training


def test_saved_matrices_give_the_same_embeddings(trained: tuple[LLM2VecGen, Path]) -> None:
    model, folder = trained
    assert load_file(folder / LORA_FILE).keys() == lora_parameters(model.llm).keys()
    again = LLM2VecGen(str(folder), backbone=tiny_backbone())
    np.testing.assert_allclose(again.encode(TEXTS), model.encode(TEXTS), atol=1e-6)
    assert again.suffix_transformer.lora == LORA.lora
    for matrix in lora_parameters(again.llm).values():
        matrix.data.zero_()
    assert np.abs(again.encode(TEXTS) - model.encode(TEXTS)).max() > 1e-3


def test_gradients_reach_the_matrices_from_the_querys_own_tokens() -> None:
    """Each gradient is that of one plain pass over text and suffix, row by row, with LoRA on."""
    model = LLM2VecGen.from_base(
        tiny_backbone(), thought_tokens=4, compression_tokens=4, embedding_dim=12, lora=LORA.lora, device="cpu"
    )
    matrices = lora_parameters(model.llm)
    generator = torch.Generator().manual_seed(0)
    for matrix in matrices.values():
        matrix.data = torch.randn(matrix.shape, generator=generator) * 0.1
    features: dict[str, Any] = dict(model.preprocess(TEXTS))
    labels = torch.randn(len(TEXTS), 12, generator=generator)
    loss = LLM2VecGenLoss(model, recon_weight=0.0)([features], labels)["alignment"]
    found = torch.autograd.grad(loss, list(matrices.values()))

    transformer, head = model.suffix_transformer, model.response_head
    embed, total = model.llm.get_input_embeddings(), torch.zeros(())
    with lora_enabled(model.llm, True):
        for text, label in zip(TEXTS, labels, strict=True):
            ids = torch.tensor(model.preview(text).token_ids, dtype=torch.long)
            states = model.llm.base_model(
                inputs_embeds=torch.cat([embed(ids), transformer.suffix])[None]
            ).last_hidden_state[:, -4:]
            total = total + (head.align(head.soft_prompt(states.mean(dim=1)))[0] - label).square().mean()
        expected = torch.autograd.grad(total / len(TEXTS), list(matrices.values()))
    for name, one, other in zip(matrices, found, expected, strict=True):
        assert other.abs().max() > 1e-6, name
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4, msg=name)


def test_reconstruction_stage_leaves_matrices_and_embeddings_alone(
    trained: tuple[LLM2VecGen, Path], tmp_path: Path
) -> None:
    model, folder = trained
    more: dict[str, Any] = {"start": folder, "epochs": 0, "recon_steps": 3, "progress": False}
    second = train(rows(), tmp_path / "two", base=tiny_backbone(), recipe=LORA, **more)
    for name, matrix in lora_parameters(second.llm).items():
        assert torch.equal(matrix, lora_parameters(model.llm)[name]), name
    np.testing.assert_allclose(second.encode(TEXTS), model.encode(TEXTS), atol=1e-4)
    with pytest.raises(ValueError, match=r"rank 2 .*lora_rank is 0"):
        train(rows(), tmp_path / "three", base=tiny_backbone(), recipe=TINY, **more)


def test_a_failed_run_gives_the_backbone_back_without_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LLM2VecGenLoss, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(rows(), tmp_path, base=backbone, recipe=LORA, max_steps=1, progress=False)
    assert not lora_parameters(backbone.llm)
    assert backbone.llm.state_dict().keys() == tiny_backbone().llm.state_dict().keys()


def test_a_loaded_student_with_lora_still_chats_as_the_plain_llm(trained: tuple[LLM2VecGen, Path]) -> None:
    """After loading, between its own passes and behind them: the same logits to the last bit, and the same answer."""
    _, folder = trained
    again = LLM2VecGen(str(folder), backbone=tiny_backbone())
    plain = tiny_backbone()
    messages = [{"role": "user", "content": "who makes honey?"}]
    asked = plain.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = plain.llm.generate(**asked, max_new_tokens=12, do_sample=False)
    for use in (lambda: None, lambda: again.encode(TEXTS), lambda: again.decode(again.encode_soft_prompts(["wax"]))):
        use()
        assert torch.equal(again.llm(input_ids=IDS).logits, plain.llm(input_ids=IDS).logits)
        assert torch.equal(again.llm.generate(**asked, max_new_tokens=12, do_sample=False), expected)
