"""Safety view: refusal wording, and the lens's probability of refusal words and of the request's own."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd
import pytest
import torch

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.interpret import REFUSAL_WORDS, logit_lens, refusal_view, refuses
from llm2vec_gen_st.interpret.dropping import bare_word
from llm2vec_gen_st.testing import tiny_model

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I’m really sorry, I cannot assist you.",
    "I am not able to do this.",
    "As an AI, I'm not designed to answer such questions.",
    "I won't provide instructions for that.",
    "We do not support such requests.",
    "I can not fulfill this request.",
    "I must decline to help.",
    "Picking a neighbour's lock is illegal.",
    "That would be against the law.",
    "It is not ethical to cheat.",
    "It's not an appropriate way.",
]
OTHERS = [
    "",
    "First, insert the key and turn it.",
    "I can help you with that.",
    "Bees make honey from nectar; they cannot make it from water.",
    "I'm glad to help.",
    "It is not right-handed.",
    "A legal contract binds both sides.",
    "You can't open it without the key.",
    "I don't know who makes honey.",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals_are_known(text: str) -> None:
    assert refuses(text)
    assert refuses("Well. " + text.upper())


@pytest.mark.parametrize("text", [text for text in OTHERS if "right" not in text])
def test_other_texts_are_not_taken_for_refusals(text: str) -> None:
    assert not refuses(text)


def test_masses_are_sums_over_the_whole_vocabulary(student: LLM2VecGen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that the tiny vocabulary has stand for refusals."""
    monkeypatch.setattr("llm2vec_gen_st.interpret.safety.REFUSAL_WORDS", frozenset({"the", "honey", "sea", "no such"}))
    texts = ["Who makes honey and wax?", "", "the sea and rivers"]
    found = refusal_view(student, texts, max_new_tokens=3)
    assert [(view.input, view.text) for view in found] == list(enumerate(texts))
    assert [view.decoded for view in found] == student.decode(texts, prompt_name="query", max_new_tokens=3)
    tokens = logit_lens(student, texts, top_k=10_000)
    own = [{"who", "makes", "make", "honey", "wax"}, set(), {"sea", "rivers", "river"}]
    pieces = [{student.tokenizer.decode([token]) for token in student.tokenizer(text)["input_ids"]} for text in texts]
    for view, words, parts in zip(found, own, pieces, strict=True):
        mine = [token for token in tokens if token.input == view.input]
        refusing = sum(token.probability for token in mine if bare_word(token.token) in {"the", "honey", "sea"}) / 4
        assert view.refusal_mass == pytest.approx(refusing, rel=1e-4)
        # Nothing but words of the text and the pieces it is made of.
        allowed = words | {bare_word(part) for part in parts}
        most = sum(token.probability for token in mine if bare_word(token.token) in allowed) / 4
        least = sum(token.probability for token in mine if bare_word(token.token) in {"honey", "sea"} & words) / 4
        assert least - 1e-6 <= view.request_mass <= most + 1e-6
    assert found[0].request_mass > 0
    assert found[1].request_mass == 0
    alone = refusal_view(student, texts[2], max_new_tokens=3)[0]
    assert alone.refusal_mass == pytest.approx(found[2].refusal_mass, rel=1e-4)


def test_a_head_that_refuses_is_seen() -> None:
    """With the LM head turned towards one word, all mass lies there."""
    model = tiny_model()
    token = next(number for number in range(320) if bare_word(str(model.tokenizer.decode([number]))) == "the")
    head = model.llm.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone() * 1e-6, requires_grad=False)
    bias = torch.nn.Parameter(torch.zeros(320), requires_grad=False)
    bias[token] = 50.0
    head.bias = bias
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm2vec_gen_st.interpret.safety.REFUSAL_WORDS", frozenset({"the"}))
        [view] = refusal_view(model, "honey", max_new_tokens=1)
    assert view.refusal_mass == pytest.approx(1.0, abs=1e-5)
    assert view.request_mass < 1e-5


def test_edges_and_table(student: LLM2VecGen) -> None:
    assert refusal_view(student, []) == []
    with pytest.raises(TypeError, match="Input 1 is not a string"):
        refusal_view(student, ["a", 1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="summary"):
        refusal_view(student, "a", prompt_name="summary")
    table = pd.DataFrame([asdict(view) for view in refusal_view(student, ["a", "b"], max_new_tokens=1)])
    assert table.shape == (2, 6)
    assert all(word == bare_word(word) for word in REFUSAL_WORDS)
