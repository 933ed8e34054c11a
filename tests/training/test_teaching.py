"""LLM2Vec teachers of the student's own LLM: one copy of it, and nothing of the teacher left in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel

from llm2vec_gen_st.backbone import load_backbone
from llm2vec_gen_st.baselines import llm2vec
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import train
from llm2vec_gen_st.training.data import load_rows, split_held_out, student_rows
from llm2vec_gen_st.training.teaching import with_targets

from .tiny import TINY, rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    backbone = tiny_backbone()
    backbone.llm.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second of two PEFT folders, as published ones stand beside each other."""
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("Tiny-mntp", "Tiny-mntp-unsup-simcse")):
        settings = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
        wrapped = get_peft_model(AutoModel.from_pretrained(base), settings)
        generator = torch.Generator().manual_seed(number)
        for weight, parameter in wrapped.named_parameters():
            if "lora_" in weight:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        wrapped.save_pretrained(folder / name)
    return folder / "Tiny-mntp-unsup-simcse"


@pytest.mark.parametrize("shared", [True, False])
def test_targets_are_the_teachers_and_the_llm_is_plain_again(
    base: Path, adapter: Path, tmp_path: Path, shared: bool
) -> None:
    recipe = TINY.with_overrides({"held_out": 3})
    backbone = load_backbone(str(base)) if shared else tiny_backbone()
    before = {name: tensor.clone() for name, tensor in backbone.llm.state_dict().items()}
    fit, held = split_held_out(load_rows(rows().remove_columns("label"), recipe), recipe)
    targets = with_targets(
        student_rows(fit, recipe), held, recipe, str(adapter), backbone, cache=tmp_path / "cache", progress=False
    )
    teacher = llm2vec(adapter, device="cpu")
    np.testing.assert_allclose(targets.labels, teacher.encode_document(fit["response"]), atol=1e-5)
    np.testing.assert_allclose(targets.rows["label"], targets.labels, atol=1e-6)
    np.testing.assert_allclose(targets.held_out, teacher.encode_document(held["response"]), atol=1e-5)
    assert not lora_parameters(backbone.llm)
    assert backbone.llm.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.llm.state_dict().items())


def test_a_student_with_lora_learns_from_a_teacher_with_lora(base: Path, adapter: Path, tmp_path: Path) -> None:
    model = train(
        rows().remove_columns("label"), tmp_path, base=str(base), teacher=str(adapter), recipe=TINY, max_steps=2,
        lora_rank=3, progress=False,
    )  # fmt: skip
    assert {min(matrix.shape) for matrix in lora_parameters(model.llm).values()} == {3}
