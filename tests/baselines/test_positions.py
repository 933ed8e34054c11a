"""Mean pooling, last token, Echo and InBedder pool the positions that define them, recomputed from the base model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines import echo, inbedder, last_token, mean_pooling
from llm2vec_gen_st.baselines.echo import BEFORE, BETWEEN
from llm2vec_gen_st.baselines.llm_module import LLMModule, similar_lengths
from llm2vec_gen_st.testing import tiny_backbone

from .families import TEXTS, family, states_by_hand

INSTRUCTION = "Generate a passage that answers this question: "


@pytest.fixture(scope="module")
def llama() -> Backbone:
    return family("llama")


def ids_of(backbone: Backbone, text: str) -> list[int]:
    return list(backbone.tokenizer(text, add_special_tokens=False)["input_ids"])


def with_bos(backbone: Backbone) -> Backbone:
    """The same LLM with a tokenizer that puts a token in front of everything."""
    from tokenizers import processors

    tokenizer = tiny_backbone().tokenizer
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return Backbone(backbone.llm, tokenizer, backbone.reference)


@pytest.mark.parametrize("prompt", ["", INSTRUCTION])
def test_mean_pooling_is_the_mean_over_the_text_and_not_the_instruction(llama: Backbone, prompt: str) -> None:
    expected = []
    for text in TEXTS:
        ids = ids_of(llama, prompt + text) or [llama.tokenizer.eos_token_id]
        places = llama.tokenizer(prompt + text, return_offsets_mapping=True)["offset_mapping"]
        in_text = [number for number, (_, end) in enumerate(places) if end > len(prompt)] or [len(ids) - 1]
        expected.append(states_by_hand(llama, ids)[in_text].mean(dim=0))
    model = mean_pooling(llama, device="cpu")
    for batch_size in (1, 5):
        found = model.encode(TEXTS, prompt=prompt or None, batch_size=batch_size)
        np.testing.assert_allclose(found, torch.stack(expected).numpy(), atol=2e-5)


@pytest.mark.parametrize("prompt", ["", INSTRUCTION])
def test_last_token_is_the_state_of_the_last_position(llama: Backbone, prompt: str) -> None:
    rows = [ids_of(llama, prompt + text) or [llama.tokenizer.eos_token_id] for text in TEXTS]
    expected = torch.stack([states_by_hand(llama, ids)[-1] for ids in rows])
    found = last_token(llama, device="cpu").encode(TEXTS, prompt=prompt or None)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)


def test_tokens_that_the_tokenizer_adds_are_read_and_not_pooled(llama: Backbone) -> None:
    backbone = with_bos(llama)
    ids = list(backbone.tokenizer("sea ice")["input_ids"])
    assert ids[0] == 1
    expected = states_by_hand(backbone, ids)[1:].mean(dim=0)
    np.testing.assert_allclose(mean_pooling(backbone, device="cpu").encode("sea ice"), expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("prompt", ["", INSTRUCTION])
def test_echo_reads_the_text_twice_and_pools_the_second_only(llama: Backbone, prompt: str) -> None:
    expected = []
    for text in TEXTS:
        again = ids_of(llama, text)
        ids = [*ids_of(llama, prompt + BEFORE), *again, *ids_of(llama, BETWEEN), *again]
        expected.append(states_by_hand(llama, ids)[-max(1, len(again)) :].mean(dim=0))
    found = echo(llama, device="cpu").encode(TEXTS, prompt=prompt or None)
    np.testing.assert_allclose(found, torch.stack(expected).numpy(), atol=2e-5)


def test_echo_lets_the_first_pooled_token_know_the_last_word(llama: Backbone) -> None:
    def first_pooled(model: SentenceTransformer, text: str) -> np.ndarray:
        module = model[0]
        assert isinstance(module, LLMModule)
        row = module.layout(text, "")
        return states_by_hand(llama, row.ids)[row.first].numpy()

    once, twice = mean_pooling(llama, device="cpu"), echo(llama, device="cpu")
    texts = ("bees make honey", "bees make wax")
    assert np.array_equal(*(first_pooled(once, text) for text in texts))
    assert np.abs(first_pooled(twice, texts[0]) - first_pooled(twice, texts[1])).max() > 1e-3


def test_echo_cuts_both_occurrences_alike(llama: Backbone) -> None:
    model = echo(llama, max_seq_length=80, device="cpu")
    row = model[0].layout("river " * 100, INSTRUCTION)
    size = row.stop - row.first
    middle = len(ids_of(llama, BETWEEN))
    assert row.cut
    assert 78 <= len(row.ids) <= 80
    assert row.ids[-size:] == row.ids[-2 * size - middle : -size - middle]
    model.max_seq_length = 40
    with pytest.raises(ValueError, match="no room for a text twice"):
        model.encode("bees", prompt=INSTRUCTION)


@pytest.mark.parametrize("prompt", [None, "Which animal is it about? "])
def test_inbedder_is_the_state_from_which_the_answer_is_generated(llama: Backbone, prompt: str | None) -> None:
    question = (prompt or "What is this text about?").strip()
    rows = [
        [*ids_of(llama, "### Input:\n"), *ids_of(llama, text), *ids_of(llama, tail)]
        for text in TEXTS
        for tail in [f"\n\n### Instruction:\n{question}\n\n### Response:"]
    ]
    expected = torch.stack([states_by_hand(llama, ids)[-1] for ids in rows])
    model = inbedder(llama, device="cpu")
    np.testing.assert_allclose(model.encode(TEXTS, prompt=prompt), expected.numpy(), atol=2e-5)
    # The LM head on that state is what writes the first token.
    logits = llama.llm(torch.tensor([rows[0]])).logits[0, -1]
    head = llama.llm.get_output_embeddings()
    assert int(head(torch.tensor(model.encode(TEXTS[:1], prompt=prompt)[0])).argmax()) == int(logits.argmax())


def test_inbedder_cuts_the_text_and_never_the_question(llama: Backbone) -> None:
    model = inbedder(llama, max_seq_length=90, device="cpu")
    tail = ids_of(llama, "\n\n### Instruction:\nWhere?\n\n### Response:")
    row = model[0].layout("river " * 100, "Where?")
    assert row.cut
    assert len(row.ids) == 90
    assert row.ids[-len(tail) :] == tail


def test_saved_instructions_are_used_by_name(llama: Backbone) -> None:
    prompts = {"query": INSTRUCTION, "document": "Summarize: "}
    for make in (mean_pooling, last_token, echo, inbedder):
        model = make(llama, prompts=prompts, device="cpu")
        np.testing.assert_array_equal(model.encode_query("bees"), model.encode("bees", prompt=INSTRUCTION))
        np.testing.assert_array_equal(model.encode_document("bees"), model.encode("bees", prompt="Summarize: "))
        assert np.abs(model.encode_query("bees") - model.encode("bees")).max() > 1e-3


@settings(max_examples=25)
@given(st.text(max_size=60), st.sampled_from(["", "Answer: ", "Summarize the text:\n"]))
def test_any_text_has_a_finite_vector_and_pooled_positions_inside_its_row(text: str, prompt: str) -> None:
    for model in _models():
        row = model[0].layout(text, prompt)
        assert 0 <= row.first < row.stop <= len(row.ids) <= 100
        assert np.isfinite(model.encode(text, prompt=prompt)).all()


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200), st.booleans())
def test_groups_hold_every_row_once_within_the_budget(lengths: list[int], budget: int, equal: bool) -> None:
    groups = list(similar_lengths(lengths, budget, equal=equal))
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[row] for row in group]
        assert len(group) == 1 or len(group) * max(sizes) <= budget
        assert max(sizes) <= min(sizes) * (1 if equal else 2)


@cache
def _models() -> list[SentenceTransformer]:
    backbone = tiny_backbone()
    return [make(backbone, max_seq_length=100, device="cpu") for make in (mean_pooling, last_token, echo, inbedder)]
