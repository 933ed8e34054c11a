"""Evening out a student's vectors: what it does to them, what it leaves alone, and that a run does it once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.testing import tiny_backbone, tiny_model
from llm2vec_gen_st.training import Recipe, run, train
from llm2vec_gen_st.training.warm_start import set_folded
from llm2vec_gen_st.training.whitening import whiten_alignment, whitening_map

from .tiny import TINY, rows

TEXTS = [f"{who} {what} in {where}" for who in ("bees", "bears") for what in ("live", "eat") for where in "abcdef"]
WHITENED = replace(
    TINY,
    init="ridge",
    ridge_refit=True,
    whitening=1.0,
    recon_weight=0.0,
    recon_steps=2,
    max_steps=2,
    save_steps=1,
    normalize_labels=True,
)


def _principal_spread(model: LLM2VecGen) -> float:
    """Share of the variance of the strongest axis."""
    vectors = model.encode([row["query"] for row in rows(16)], prompt="")
    variances = np.linalg.eigvalsh(np.cov(vectors.T))
    return float(variances[-1] / variances.sum())


def _trained(folder: Path, recipe: Recipe = WHITENED, **more: Any) -> LLM2VecGen:
    return train(rows(16), folder, base=tiny_backbone(), recipe=recipe, progress=False, **more)


def _tensors(model: LLM2VecGen) -> dict[str, torch.Tensor]:
    return {"suffix": model.suffix_transformer.suffix.data, **model.response_head.state_dict()}


@given(seed=st.integers(0, 2**16), width=st.integers(1, 6), strength=st.floats(0, 1))
def test_variances_along_the_axes_are_raised_to_a_power(seed: int, width: int, strength: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64) + 2 * torch.eye(width)
    vectors = torch.randn(60, width, generator=generator, dtype=torch.float64) @ mixing + 3
    weight, mean = whitening_map(vectors, strength, shrinkage=0.0)
    before = torch.linalg.eigvalsh(torch.cov(vectors.T).reshape(width, width))
    after = torch.linalg.eigvalsh(torch.cov(((vectors - mean) @ weight.T).T).reshape(width, width))
    torch.testing.assert_close(after.sort().values, (before ** (1 - strength)).sort().values, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weight, weight.T)


def test_a_direction_without_spread_does_not_become_noise() -> None:
    vectors = torch.cat([torch.randn(50, 2), torch.zeros(50, 1)], dim=1)
    weight, _ = whitening_map(vectors, 1.0)
    assert weight.isfinite().all()
    assert weight.max() < 5


def test_one_vector_has_no_spread() -> None:
    with pytest.raises(ValueError, match=r"two vectors or more, got 1"):
        whitening_map(torch.ones(1, 3), 1.0)


def test_the_map_is_folded_into_the_head_and_soft_prompts_stay() -> None:
    model = tiny_model()
    before, prompts = torch.as_tensor(model.encode(TEXTS, prompt="")), model.encode_soft_prompts(TEXTS)
    whiten_alignment(model, TEXTS, 0.7, progress=False)
    weight, mean = whitening_map(before, 0.7)
    wanted = ((before.double() - mean) @ weight.T).float()
    torch.testing.assert_close(torch.as_tensor(model.encode(TEXTS, prompt="")), wanted, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(model.encode_soft_prompts(TEXTS), prompts)


def test_a_student_without_alignment_cannot_be_whitened() -> None:
    model = tiny_model()
    model.response_head.mlp_align = None
    with pytest.raises(ValueError, match="does not have"):
        whiten_alignment(model, TEXTS, 0.5, progress=False)


def test_a_run_whitens_at_its_end(tmp_path: Path) -> None:
    plain = _trained(tmp_path / "plain", replace(WHITENED, whitening=0.0))
    whitened = _trained(tmp_path / "whitened")
    assert _principal_spread(whitened) < 0.8 * _principal_spread(plain)
    torch.testing.assert_close(_tensors(whitened)["suffix"], _tensors(plain)["suffix"], rtol=0, atol=0)


@pytest.mark.parametrize("calls", ["before", "after"])
def test_a_run_stopped_at_the_whitening_comes_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str
) -> None:
    whole = _tensors(_trained(tmp_path / "whole"))

    def stop(*given: Any, **more: Any) -> None:
        if calls == "after":
            whiten_alignment(*given, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "whiten_alignment", stop)
        with pytest.raises(KeyboardInterrupt):
            _trained(tmp_path / "stopped")
    again = _tensors(_trained(tmp_path / "stopped"))
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_whitened_student_goes_on_from_its_teachers_space(tmp_path: Path) -> None:
    _trained(tmp_path / "first")
    _trained(tmp_path / "second", start=tmp_path / "first")
    assert (tmp_path / "second" / "training" / "ridge_start.json").exists()
    # Steps that only reconstruct leave its vectors as they are.
    last = _trained(tmp_path / "third", replace(WHITENED, epochs=0, max_steps=-1), start=tmp_path / "second")
    second = LLM2VecGen(str(tmp_path / "second"), backbone=tiny_backbone())
    np.testing.assert_allclose(last.encode(TEXTS), second.encode(TEXTS), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_strength_is_from_nothing_to_full(value: float) -> None:
    with pytest.raises(ValueError, match="whitening must be from 0 to 1"):
        Recipe(whitening=value)


def test_rounding_of_the_alignment_does_nothing_at_the_center() -> None:
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    head = model.response_head
    assert head.mlp_recon is not None
    # Nearly singular, so that MLP_align is thousands of times larger than what both heads are together.
    axes = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64)).Q
    head.mlp_recon.weight.data.copy_(axes @ torch.diag(torch.logspace(-4, 0, 64).double()) @ axes.T)
    weight, bias, center = (torch.randn(*shape, generator=generator) for shape in ((48, 64), (48,), (64,)))
    set_folded(model, weight, bias, 100 * center)
    with torch.no_grad():
        found = head({"compression_states": 100 * center.repeat(1, 4, 1)})["sentence_embedding"][0]
    wanted = (weight.double() @ (100 * center.double()) + bias).float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
