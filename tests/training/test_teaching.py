"""LLM2Vec teachers of the student's own LLM: one copy of it, and nothing of the teacher left in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from llm2vec_gen_st.backbone import load_backbone
from llm2vec_gen_st.baselines import StageSettings, llm2vec, train_llm2vec
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.testing import saved_base, tiny_backbone
from llm2vec_gen_st.training import Recipe, train
from llm2vec_gen_st.training.data import load_rows, split_held_out, student_rows
from llm2vec_gen_st.training.record import read_record
from llm2vec_gen_st.training.teaching import ready_teacher, with_targets

from .tiny import TINY, rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_base(tmp_path_factory.mktemp("base"))


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


def test_an_llm2vec_trained_here_is_a_teacher_by_its_name(base: Path, tmp_path: Path) -> None:
    """In a recipe's file; on the student's own LLM, of which there stays one copy, plain behind it."""
    stage = StageSettings(steps=2, batch_size=4, learning_rate=1e-2, max_seq_length=64)
    texts = [f"bees make {number} jars of honey" for number in range(8)]
    train_llm2vec(str(base), texts, tmp_path / "mine", mntp=stage, simcse=stage, progress=False)
    (tmp_path / "recipe.json").write_text(json.dumps({**_fields(TINY), "teacher": str(tmp_path / "mine")}))
    data = rows().remove_columns("label")
    backbone = load_backbone(str(base))
    with ready_teacher(str(tmp_path / "mine"), backbone) as ready:
        assert isinstance(ready, SentenceTransformer)
        assert ready[0].llm is backbone.llm
        found = ready.encode_document(data["response"][:4])
    assert not lora_parameters(backbone.llm)
    expected = llm2vec(tmp_path / "mine", device="cpu").encode_document(data["response"][:4])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    other = tiny_backbone(seed=1)
    with ready_teacher(str(tmp_path / "mine"), other) as ready:
        np.testing.assert_allclose(ready.encode_document(data["response"][:4]), expected, atol=1e-5)
    assert not lora_parameters(other.llm)
    model = train(data, tmp_path / "out", base=backbone, recipe=tmp_path / "recipe.json", max_steps=1, progress=False)
    assert model.response_head.embedding_dim == 64
    assert read_record(tmp_path / "out")["teacher"] == str(tmp_path / "mine")


def _fields(recipe: Recipe) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(recipe).items() if name != "base"}
