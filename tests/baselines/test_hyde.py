"""HyDE: the mean of query and answers, documents as they are, and no answer ever written twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines import answers as answers_module
from llm2vec_gen_st.baselines import hyde, mean_pooling
from llm2vec_gen_st.prompts import QUERY
from llm2vec_gen_st.responses.generation import GenerationSettings, Response, generate_responses
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.text import TextTokenizer

from .families import family

QUERIES = ["Who makes honey?", "Where do polar bears live?", "What is a river?"]
SHORT: dict[str, Any] = {"max_new_tokens": 6, "device": "cpu"}


@pytest.fixture(scope="module")
def llama() -> Backbone:
    return tiny_backbone()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Queries that the LLM was asked, in order."""
    asked: list[str] = []

    def watched(backbone: Any, plain: Any, queries: Sequence[str], *args: Any, **kwargs: Any) -> list[Response]:
        asked.extend(queries)
        return generate_responses(backbone, plain, queries, *args, **kwargs)

    monkeypatch.setattr(answers_module, "generate_responses", watched)
    return asked


def _scripted(monkeypatch: pytest.MonkeyPatch, script: dict[str, list[Response]]) -> None:
    """An LLM that answers each query with the next line of its script."""
    left = {query: list(lines) for query, lines in script.items()}
    monkeypatch.setattr(
        answers_module,
        "generate_responses",
        lambda backbone, plain, queries, *args, **kwargs: [left[query].pop(0) for query in queries],
    )


def _ok(text: str) -> Response:
    return Response(text, len(text.split()), "ok")


def test_query_is_the_mean_of_its_own_vector_and_those_of_its_answers(
    llama: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = mean_pooling(llama, prompts={"query": "q: ", "document": "d: "}, device="cpu")
    _scripted(monkeypatch, {"Answer: bees": [_ok("honey"), _ok("wax")], "Answer: sea": [_ok("ice"), _ok("salt")]})
    model = hyde(llama, encoder=encoder, answers=2, prompts={"query": "Answer: "}, **SHORT)
    found = model.encode_query(["bees", "sea"])
    for row, (query, answers) in enumerate({"bees": ["honey", "wax"], "sea": ["ice", "salt"]}.items()):
        parts = [encoder.encode_query(query), *encoder.encode_document(answers)]
        np.testing.assert_allclose(found[row], np.mean(parts, axis=0), atol=1e-6)


def test_an_empty_answer_is_left_out_of_the_mean(llama: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = mean_pooling(llama, device="cpu")
    empty = Response("", 0, "empty")
    _scripted(monkeypatch, {f"{QUERY}bees": [_ok("honey"), empty], f"{QUERY}sea": [empty, empty]})
    model = hyde(llama, encoder=encoder, answers=2, **SHORT)
    found = model.encode_query(["bees", "sea"])
    np.testing.assert_allclose(found[0], (encoder.encode("bees") + encoder.encode("honey")) / 2, atol=1e-6)
    np.testing.assert_allclose(found[1], encoder.encode("sea"), atol=1e-6)


def test_documents_are_encoded_as_they_are_and_cost_no_answer(llama: Backbone, written: list[str]) -> None:
    encoder = mean_pooling(llama, prompts={"document": "Summarize: "}, device="cpu")
    model = hyde(llama, encoder=encoder, answers=1, **SHORT)
    np.testing.assert_allclose(model.encode_document(QUERIES), encoder.encode_document(QUERIES), atol=1e-6)
    assert written == []


def test_documents_and_answers_are_encoded_alike_whatever_prompt_documents_are_given(
    llama: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted(monkeypatch, {"Answer: bees": [_ok("Bees make honey.")]})
    encoder = mean_pooling(llama, device="cpu")
    model = hyde(llama, answers=1, prompts={"query": "Answer: ", "document": "Summarize: "}, **SHORT)
    with pytest.warns(UserWarning, match="'Summarize: ' is not used"):
        document = model.encode_document("Bees make honey.")
    of_answer = 2 * model.encode_query("bees") - encoder.encode("bees")
    np.testing.assert_allclose(document, of_answer, atol=1e-5)


def test_answer_is_what_the_llm_writes_to_instruction_and_query() -> None:
    llama = family("llama")
    settings = GenerationSettings(max_new_tokens=6, temperature=0.0)
    (response,) = generate_responses(llama, TextTokenizer(llama.tokenizer), [QUERY + QUERIES[0]], settings)
    encoder = mean_pooling(llama, device="cpu")
    model = hyde(llama, answers=1, temperature=0.0, **SHORT)
    expected = (encoder.encode(QUERIES[0]) + encoder.encode(response.text)) / 2
    assert response.text
    np.testing.assert_allclose(model.encode_query(QUERIES[0]), expected, atol=1e-6)


def test_no_answer_is_written_twice_also_in_another_run(llama: Backbone, written: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "answers.sqlite"
    first = hyde(llama, answers=2, cache=cache, **SHORT)
    vectors = first.encode_query([*QUERIES, QUERIES[0]])
    assert sorted(written) == sorted(QUERY + query for query in QUERIES * 2)
    np.testing.assert_array_equal(vectors[0], vectors[3])
    assert first[0].writer.generated_tokens > 0
    written.clear()
    # Another process, with another copy of the LLM.
    again = hyde(tiny_backbone(), answers=2, cache=cache, **SHORT)
    np.testing.assert_allclose(again.encode_query(QUERIES), vectors[:3], atol=1e-6)
    assert written == []
    assert again[0].writer.generated_tokens == 0
    # One more answer a query costs one answer a query.
    hyde(llama, answers=3, cache=cache, **SHORT).encode_query(QUERIES)
    assert sorted(written) == sorted(QUERY + query for query in QUERIES)


@pytest.mark.parametrize(
    "change",
    [{"max_new_tokens": 7}, {"temperature": 0.9}, {"seed": 1}, {"prompts": {"query": "Say: "}}, {"base": 1}],
    ids=lambda change: next(iter(change)),
)
def test_answers_of_other_settings_llms_and_instructions_are_not_mixed_up(
    llama: Backbone, written: list[str], tmp_path: Path, change: dict[str, Any]
) -> None:
    cache = tmp_path / "answers.sqlite"
    hyde(llama, answers=1, cache=cache, **SHORT).encode_query(QUERIES[:1])
    base = tiny_backbone(seed=change.pop("base")) if "base" in change else llama
    written.clear()
    hyde(base, answers=1, cache=cache, **{**SHORT, **change}).encode_query(QUERIES[:1])
    assert len(written) == 1


def test_a_stopped_run_goes_on_after_its_last_batch(
    llama: Backbone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache, calls = tmp_path / "answers.sqlite", []

    def stopping(backbone: Any, plain: Any, queries: Sequence[str], *args: Any, **kwargs: Any) -> list[Response]:
        calls.append(list(queries))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [_ok("yes") for _ in queries]

    monkeypatch.setattr(answers_module, "generate_responses", stopping)
    model = hyde(llama, answers=1, cache=cache, batch_size=1, **SHORT)
    with pytest.raises(KeyboardInterrupt):
        model.encode_query(QUERIES)
    model.encode_query(QUERIES)
    assert calls[3:] == calls[2:3]
    with sqlite3.connect(cache) as store:
        assert store.execute("SELECT count(*) FROM answers").fetchone() == (3,)


def test_answers_of_a_broken_llm_are_refused_and_not_kept(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    with torch.no_grad():
        backbone.llm.get_input_embeddings().weight[:] = float("nan")
    cache = tmp_path / "answers.sqlite"
    with pytest.raises(FloatingPointError, match="not finite while it answers"):
        hyde(backbone, answers=1, cache=cache, **SHORT).encode_query(QUERIES[:1])
    with sqlite3.connect(cache) as store:
        assert store.execute("SELECT count(*) FROM answers").fetchone() == (0,)


def test_lone_surrogates_in_queries_are_answered_and_kept(llama: Backbone, written: list[str], tmp_path: Path) -> None:
    model = hyde(llama, answers=1, cache=tmp_path / "a.sqlite", **SHORT)
    first = model.encode_query(["bees \ud800"])
    np.testing.assert_array_equal(model.encode_query(["bees \ud800"]), first)
    assert len(written) == 1


def test_equal_answers_are_refused_before_anything_is_loaded_for_them(llama: Backbone) -> None:
    with pytest.raises(ValueError, match="all 3 answers would be the same"):
        hyde(llama, answers=3, temperature=0.0)
    with pytest.raises(ValueError, match="at least 1 answer"):
        hyde(llama, answers=0)


def test_saved_model_keeps_encoder_settings_and_answers(llama_folder: Path, written: list[str], tmp_path: Path) -> None:
    model = hyde(str(llama_folder), answers=2, cache=tmp_path / "a.sqlite", prompts={"query": "Say: "}, **SHORT)
    expected = model.encode_query(QUERIES)
    model.save_pretrained(str(tmp_path / "saved"))
    written.clear()
    loaded = SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(loaded.encode_query(QUERIES), expected, atol=1e-6)
    assert written == []
    assert loaded[0].llm is loaded[0].encoder[0].llm
    assert not list((tmp_path / "saved").rglob("*.bin"))
    assert sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*.safetensors")) == 0
