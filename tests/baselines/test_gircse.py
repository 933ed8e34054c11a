"""GIRCSE: soft tokens are the mixtures they should be, for every family, and the loss is the stepwise one."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines import gircse
from llm2vec_gen_st.baselines.gircse_training import StepwiseContrastiveLoss

from .families import TEXTS, family


def soft_states_by_hand(backbone: Backbone, text: str, steps: int, temperature: float) -> torch.Tensor:
    """States (K, H) of the soft tokens: whole forwards of one row, no cache, mixtures of looked-up embeddings."""
    ids = list(backbone.tokenizer(text)["input_ids"]) or [backbone.tokenizer.eos_token_id]
    vocabulary = torch.arange(320)
    with torch.no_grad():
        table = backbone.llm.get_input_embeddings()(vocabulary)
        row = backbone.llm.get_input_embeddings()(torch.tensor([ids]))
        for _ in range(steps):
            logits = backbone.llm(inputs_embeds=row, use_cache=False).logits[0, -1]
            row = torch.cat([row, ((logits / temperature).softmax(dim=-1) @ table)[None, None]], dim=1)
        found: torch.Tensor = backbone.llm.base_model(inputs_embeds=row, use_cache=False).last_hidden_state[0, -steps:]
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2, windows", "qwen3", "mistral", "gemma3"])
def test_soft_tokens_are_those_computed_by_hand(name: str) -> None:
    backbone = family(name)
    model = gircse(backbone, soft_tokens=3, temperature=0.5, device="cpu")
    expected = torch.stack([soft_states_by_hand(backbone, text, 3, 0.5) for text in TEXTS])
    with torch.no_grad():
        features = model(model.preprocess(TEXTS))
    torch.testing.assert_close(features["soft_states"], expected, atol=1e-4, rtol=1e-3)
    for batch_size in (1, 5):
        np.testing.assert_allclose(
            model.encode(TEXTS, batch_size=batch_size), expected.mean(dim=1).numpy(), atol=1e-4, rtol=1e-3
        )


def test_more_soft_tokens_can_be_asked_for_after_training() -> None:
    backbone = family("llama")
    model = gircse(backbone, soft_tokens=2, device="cpu")
    model[0].soft_tokens = 4
    expected = soft_states_by_hand(backbone, TEXTS[1], 4, 1.0).mean(dim=0)
    np.testing.assert_allclose(model.encode(TEXTS[1]), expected.numpy(), atol=1e-4, rtol=1e-3)


def test_instruction_is_read_before_the_text() -> None:
    backbone = family("llama")
    model = gircse(backbone, soft_tokens=2, prompts={"query": "Who? "}, device="cpu")
    expected = soft_states_by_hand(backbone, "Who? bees", 2, 1.0).mean(dim=0)
    np.testing.assert_allclose(model.encode_query("bees"), expected.numpy(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("options", [{"soft_tokens": 0}, {"temperature": 0.0}])
def test_settings_without_meaning_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1 soft token and a temperature above 0"):
        gircse(family("llama"), **options)


def test_each_step_is_contrasted_and_a_worse_step_is_penalized() -> None:
    loss = StepwiseContrastiveLoss(gircse(family("llama"), device="cpu"), temperature=0.1, refinement_weight=2.0)
    generator = torch.Generator().manual_seed(0)
    anchors, positives = (torch.randn(4, 3, 8, generator=generator) for _ in range(2))
    by_hand = []
    for step in range(1, 4):
        total = 0.0
        for row in range(4):
            anchor = anchors[row, :step].mean(dim=0)
            scores = [
                float(torch.cosine_similarity(anchor, positives[other, :step].mean(dim=0), dim=0)) / 0.1
                for other in range(4)
            ]
            total += math.log(sum(math.exp(score) for score in scores)) - scores[row]
        by_hand.append(total / 4)
    steps = loss.step_losses(anchors, positives)
    np.testing.assert_allclose(steps.numpy(), by_hand, rtol=1e-5)
    growth = [max(0.0, math.log(after) - math.log(before)) for before, after in pairwise(by_hand)]
    np.testing.assert_allclose(float(loss.from_steps(steps)), sum(by_hand) / 3 + 2.0 * sum(growth) / 2, rtol=1e-5)
    better, worse = torch.tensor([2.0, 1.0, 0.5]), torch.tensor([0.5, 1.0, 2.0])
    assert float(loss.from_steps(better)) == pytest.approx(3.5 / 3)
    assert float(loss.from_steps(worse)) == pytest.approx(3.5 / 3 + 2.0 * math.log(2.0), rel=1e-5)


def test_gradients_reach_the_first_soft_token_through_those_after_it() -> None:
    backbone = family("llama")
    module = gircse(backbone, soft_tokens=3, device="cpu")[0]
    caught: list[torch.Tensor] = []
    original = module.soft_token

    def watched(state: torch.Tensor) -> torch.Tensor:
        token = original(state).detach().requires_grad_() if not caught else original(state)
        caught.append(token)
        return token

    module.soft_token = watched
    states = module.soft_states(torch.tensor([[5, 6, 7]]), torch.tensor([3]))
    states[:, -1].sum().backward()
    assert caught[0].grad is not None
    assert float(caught[0].grad.abs().max()) > 0
