"""What `frontiers.py` measures: latent chains, latent messages, reconstruction on or off, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from decodability import content_words
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.interpret import (
    answer_messages,
    latent_chain,
    receive_message,
    refusal_view,
    refuses,
    send_messages,
)
from llm2vec_gen_st.interpret.messages import Place
from llm2vec_gen_st.prompts import DOCUMENT, QUERY
from llm2vec_gen_st.responses.generation import GenerationSettings, generate_responses
from llm2vec_gen_st.teachers.sources import Teacher
from llm2vec_gen_st.text import TextTokenizer
from llm2vec_gen_st.training.warm_start import mean_states, set_folded

RESPONSE_TOKENS = 40
_DECODED_TOKENS = 16
# One batch for all: on a CPU a step costs little more for many rows than for few.
_BATCH = 128
_RESAMPLES = 2000

Figure = dict[str, float]
"""``value``, and ``low`` and ``high`` of its 95 % bootstrap interval."""


@dataclass(frozen=True)
class Passages:
    """Questions, each with one passage that answers it, among passages that do not.

    Args:
        questions: N questions.
        texts: P passages, P >= N; the passage of question i is passage i.
    """

    questions: list[str]
    texts: list[str]


def figure(values: Any, statistic: Callable[[np.ndarray], float] = lambda rows: float(rows.mean())) -> Figure:
    """A statistic of N rows, with the percentiles of 2,000 resamples of the rows."""
    rows = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    drawn = [statistic(rows[random.integers(0, len(rows), len(rows))]) for _ in range(_RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"value": statistic(rows), "low": float(low), "high": float(high)}


def responses(backbone: Backbone, texts: Sequence[str], tokens: int = RESPONSE_TOKENS) -> list[str]:
    """What the LLM answers to texts in its own chat format, greedily."""
    settings = GenerationSettings(max_new_tokens=tokens)
    plain = TextTokenizer(backbone.tokenizer)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    found = [""] * len(texts)
    for start in range(0, len(order), _BATCH):
        rows = order[start : start + _BATCH]
        for row, written in zip(
            rows, generate_responses(backbone, plain, [texts[row] for row in rows], settings), strict=True
        ):
            found[row] = written.text
    return found


def chaining(
    model: LLM2VecGen, teacher: Teacher, queries: list[str], written: list[str], passages: Passages, steps: int
) -> list[dict[str, Any]]:
    """Steps of chains, alone and behind the text: how near to the response they are, and how well they retrieve."""
    targets = teacher.embed(written)
    corpus = model.encode_document(passages.texts, batch_size=32)
    rows: list[dict[str, Any]] = []
    for behind_text in (False, True):
        options: dict[str, Any] = {"steps": steps, "behind_text": behind_text, "batch_size": _BATCH}
        said = latent_chain(model, queries, max_new_tokens=_DECODED_TOKENS, **options)
        asked = latent_chain(model, passages.questions, max_new_tokens=1, **options)
        # Centred on the means of step 0, so that a common drift counts as drift.
        center = np.stack([step.embedding for step in said if step.step == 0]).mean(axis=0)
        for number in range(steps + 1):
            own = [step for step in said if step.step == number]
            vectors = np.stack([step.embedding for step in own]) - center
            cosines = _unit(vectors) @ _unit(targets - targets.mean(axis=0)).T
            search = np.stack([step.embedding for step in asked if step.step == number])
            rows.append(
                {
                    "behind_text": behind_text,
                    "step": number,
                    "cosine_to_response": figure(np.diag(cosines)),
                    "response_first": figure(cosines.argmax(axis=1) == np.arange(len(own))),
                    "passage_mrr": figure(reciprocal_ranks(search, corpus)),
                    "response_word_decoded": figure(word_hits(queries, written, [step.decoded for step in own])),
                    "similarity_to_first": figure([step.similarity_to_first for step in own]),
                    "similarity_to_previous": figure([step.similarity_to_previous for step in own]),
                    "distinct_decoded": len({step.decoded for step in own}) / len(own),
                }
            )
    return rows


def messages(
    model: LLM2VecGen, judge: SentenceTransformer, queries: list[str], references: list[str]
) -> dict[str, Any]:
    """How near an answer to a latent message is to the answer to its text, beside other things B could be given."""
    sent = send_messages(model, queries)
    received = [receive_message(model, data) for data in sent]
    found = answer_messages(model, received, place="user", max_new_tokens=RESPONSE_TOKENS, batch_size=_BATCH)
    decoded = [transcript.decoded for transcript in found]
    plain = model.suffix_transformer.text_tokenizer
    [nothing] = responses(model.backbone, [""])
    shift = np.roll(np.arange(len(queries)), 1)
    in_user_place = [transcript.answer for transcript in found]
    answers = {
        # Nothing around it: B answers with what the message decodes to.
        "latent message, as a prefix": decoded,
        "latent message, in the user's place": in_user_place,
        "decoded message, as text": responses(model.backbone, decoded),
        "another query's latent message, as a prefix": [decoded[row] for row in shift],
        "another query's latent message, in the user's place": [in_user_place[row] for row in shift],
        "another query's text": [references[row] for row in shift],
        "no message": [nothing] * len(queries),
    }
    target = judge.encode(references, normalize_embeddings=True)
    return {
        "answers": {name: _likeness(judge, texts, target) for name, texts in answers.items()},
        "cost": {
            "vectors": len(received[0].soft_prompt),
            "message_bytes": float(np.mean([len(data) for data in sent])),
            "text_tokens": float(np.mean([len(plain.ids(query, add_special_tokens=False).ids) for query in queries])),
            "text_bytes": float(np.mean([len(query.encode()) for query in queries])),
        },
    }


def places(
    model: LLM2VecGen, judge: SentenceTransformer, queries: list[str], references: list[str]
) -> dict[str, dict[str, Figure]]:
    """Likeness of answers to references for both places that a soft prompt can have."""
    received = [receive_message(model, data) for data in send_messages(model, queries)]
    target = judge.encode(references, normalize_embeddings=True)
    choices: tuple[Place, ...] = ("prefix", "user")
    return {
        place: _likeness(judge, [transcript.answer for transcript in found], target)
        for place in choices
        for found in [answer_messages(model, received, place=place, max_new_tokens=RESPONSE_TOKENS, batch_size=_BATCH)]
    }


def _likeness(judge: SentenceTransformer, answers: Sequence[str], targets: np.ndarray) -> dict[str, Figure]:
    """Similarity of answers to the targets of their queries, and how many are nearest to their own of all targets."""
    cosines = judge.encode(list(answers), normalize_embeddings=True) @ targets.T
    return {
        "similarity": figure(np.diag(cosines)),
        "nearest": figure(cosines.argmax(axis=1) == np.arange(len(answers))),
    }


def without_reconstruction(model: LLM2VecGen, queries: Sequence[str]) -> None:
    """Give a student the MLP_recon that its recipe starts from, and leave its embeddings as they are.

    Recipes with a reconstruction stage of its own train suffix and embedding without any reconstruction loss; up to
    that stage MLP_recon is the ridge start's: a multiple of the identity that brings states to the scale of the LLM's
    input embeddings.

    Args:
        model: The student, changed in place.
        queries: Inputs, instruction included, to take the states' scale of.
    """
    head = model.response_head
    assert head.mlp_recon is not None
    folded = head.folded()
    states = mean_states(model, queries, progress=False)
    scale = float(embedding_weight(model.llm).float().std() / states.std())
    with torch.no_grad():
        head.mlp_recon.weight.copy_(scale * torch.eye(head.hidden_size))
        head.mlp_recon.bias.zero_()
    set_folded(model, *folded, states.mean(dim=0))


def quality(
    model: LLM2VecGen,
    teacher: Teacher,
    queries: list[str],
    written: list[str],
    passages: Passages,
    pairs: Sequence[dict[str, Any]],
) -> dict[str, Figure]:
    """Embedding quality and decodability of one student."""
    vectors, targets = model.encode_query(queries, batch_size=32), teacher.embed(written)
    cosines = _unit(vectors - vectors.mean(axis=0)) @ _unit(targets - targets.mean(axis=0)).T
    first, second = (model.encode([pair[key] for pair in pairs], prompt=DOCUMENT) for key in ("sentence1", "sentence2"))
    similar = (_unit(first) * _unit(second)).sum(axis=1)
    scores = np.column_stack([similar, [pair["score"] for pair in pairs]])
    ranks = reciprocal_ranks(
        model.encode_query(passages.questions, batch_size=32), model.encode_document(passages.texts, batch_size=32)
    )
    decoded = model.decode(queries, prompt=QUERY, max_new_tokens=_DECODED_TOKENS, batch_size=_BATCH)
    another = [written[row] for row in np.roll(np.arange(len(written)), 1)]
    return {
        "sts": figure(scores, lambda rows: float(spearmanr(rows[:, 0], rows[:, 1]).statistic)),
        "passage_mrr": figure(ranks),
        "response_first": figure(cosines.argmax(axis=1) == np.arange(len(queries))),
        "response_word_decoded": figure(word_hits(queries, written, decoded)),
        "another_response_word_decoded": figure(word_hits(queries, another, decoded)),
    }


def safety(model: LLM2VecGen, kinds: dict[str, list[str]]) -> dict[str, Any]:
    """What the embeddings of requests, refused ones and harmless ones in pairs, say of refusal."""
    views = {kind: refusal_view(model, texts) for kind, texts in kinds.items()}
    pairs = zip(views["refused"], views["harmless"], strict=True)
    return {
        "more_refusal_in_refused": float(np.mean([one.refusal_mass > other.refusal_mass for one, other in pairs])),
        "kinds": {
            kind: {
                "decoded_refuses": figure([view.refuses for view in found]),
                "refusal_mass": figure([view.refusal_mass for view in found]),
                "request_mass": figure([view.request_mass for view in found]),
            }
            for kind, found in views.items()
        },
    }


def written_refusals(backbone: Backbone, texts: list[str]) -> Figure:
    """How many of some requests the LLM itself refuses, in words."""
    return figure([refuses(text) for text in responses(backbone, texts, 64)])


def word_hits(queries: Sequence[str], targets: Sequence[str], decoded: Sequence[str]) -> list[bool]:
    """For each query whether a decoded text holds a content word of a response that the query does not hold."""
    return [
        bool((content_words(text) & content_words(target)) - content_words(query))
        for query, target, text in zip(queries, targets, decoded, strict=True)
    ]


def reciprocal_ranks(vectors: np.ndarray, corpus: np.ndarray) -> np.ndarray:
    """1 / rank of passage i for question i, 0 beyond rank 10."""
    scores = _unit(vectors) @ _unit(corpus).T
    own = scores[np.arange(len(vectors)), np.arange(len(vectors))]
    ranks = 1 + (scores > own[:, None]).sum(axis=1)
    return np.where(ranks <= 10, 1 / ranks, 0.0)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
