"""What the page computes, without a page: the same as the public functions, by threads too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from langchain_llm2vec_gen import FaissStore

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.app import Hit, QueryReader, Reading, cosine, passages_store
from llm2vec_gen_st.interpret import Dropping, logit_lens
from llm2vec_gen_st.testing import tiny_model

QUERIES = ["who makes honey?", "where do polar bears live?"]


@pytest.fixture(scope="module")
def reader(student: LLM2VecGen, store: FaissStore) -> QueryReader:
    return QueryReader(student, store, max_new_tokens=6)


def test_a_reading_is_what_the_public_functions_find(
    reader: QueryReader, student: LLM2VecGen, store: FaissStore
) -> None:
    readings = reader.read([f"  {QUERIES[0]}\n", QUERIES[1]])
    tokens = logit_lens(student, QUERIES, top_k=5, drop=Dropping(), prompt_name="query")
    decoded = student.decode(QUERIES, prompt_name="query", max_new_tokens=6)
    assert [reading.text for reading in readings] == QUERIES
    for number, reading in enumerate(readings):
        np.testing.assert_allclose(reading.embedding, student.encode_query(QUERIES[number]), atol=1e-6)
        assert reading.tokens == tuple(token for token in tokens if token.input == number)
        assert reading.decoded == decoded[number]
        assert not reading.cut
        expected = store.similarity_search_with_score(QUERIES[number], k=3)
        assert reading.hits is not None
        assert [(hit.text, hit.source) for hit in reading.hits] == [(doc.page_content, doc.id) for doc, _ in expected]
        assert [hit.score for hit in reading.hits] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert cosine(readings[0], readings[0]) == pytest.approx(1.0, abs=1e-6)
    expected_cosine = student.similarity(student.encode_query(QUERIES[:1]), student.encode_query(QUERIES[1:])).item()
    assert cosine(*readings) == pytest.approx(expected_cosine, abs=1e-5)


def test_what_is_found_is_shown_as_it_comes(reader: QueryReader) -> None:
    steps = list(reader.steps(QUERIES[:1]))
    assert [step.doing for step in steps] == ["searching passages", "looking through the lens", "decoding", None]
    there = [[getattr(step.readings[0], part) is not None for part in ("hits", "tokens", "decoded")] for step in steps]
    assert there == [[False, False, False], [True, False, False], [True, True, False], [True, True, True]]
    assert steps[-1].readings == reader.read(QUERIES[:1])


def test_threads_find_what_one_thread_finds(reader: QueryReader) -> None:
    queries = [f"{query} {number}" for number, query in enumerate(QUERIES * 4)]
    alone = [reader.read([query]) for query in queries]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda query: reader.read([query]), queries)) == alone


def test_an_abandoned_reading_keeps_nobody_waiting(reader: QueryReader) -> None:
    abandoned = reader.steps(QUERIES)
    for _ in range(3):
        next(abandoned)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(reader.read, QUERIES[:1]).result(timeout=60)


@pytest.mark.parametrize("texts", [[], [""], [" \n"], ["bees", ""]])
def test_an_empty_query_is_refused(reader: QueryReader, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        reader.read(texts)


def test_a_query_beyond_the_window_says_so(reader: QueryReader) -> None:
    (reading,) = reader.read(["honey " * 2000])
    assert reading.cut


def test_an_empty_store_finds_nothing(student: LLM2VecGen) -> None:
    with passages_store(student, []) as empty:
        (reading,) = QueryReader(student, empty, max_new_tokens=2).read(QUERIES[:1])
    assert reading.hits == ()


def test_sources_are_named_where_they_are_known(student: LLM2VecGen, store: FaissStore) -> None:
    with FaissStore.from_texts([], store.embeddings) as other:
        other.add_texts(["Bees make honey."], [{"source": "notes/bees.md"}], ids=["b"])
        (reading,) = QueryReader(student, other, max_new_tokens=2).read(QUERIES[:1])
    assert reading.hits is not None
    assert [(hit.text, hit.source) for hit in reading.hits] == [("Bees make honey.", "notes/bees.md")]


def test_a_store_of_another_dimension_is_told_in_a_sentence(store: FaissStore) -> None:
    other = LLM2VecGen.from_base(
        tiny_model().backbone, thought_tokens=2, compression_tokens=2, embedding_dim=8, device="cpu"
    )
    with pytest.raises(ValueError, match="8"):
        QueryReader(other, store).read(QUERIES[:1])


def test_readings_compare_by_what_is_shown() -> None:
    hits = (Hit("a", "b", 0.5),)
    one, other = np.ones(2, np.float32), np.zeros(2, np.float32)
    assert Reading("q", embedding=one, hits=hits) == Reading("q", embedding=other, hits=hits)
    assert cosine(Reading("q", embedding=one), Reading("q", embedding=other)) == 0.0
