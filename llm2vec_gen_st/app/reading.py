"""What a query's embedding holds, as plain data: nearest passages, lens, decoded text. Knows nothing of the page."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from llm2vec_gen_st.demo.run import Passage
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.interpret import Dropping, LensToken, logit_lens
from llm2vec_gen_st.model import LLM2VecGen

if TYPE_CHECKING:
    from langchain_llm2vec_gen import FaissStore

_QUERY = "query"


@dataclass(frozen=True)
class Hit:
    """One passage that was found.

    Args:
        text: The passage.
        source: Where it comes from, or its id.
        score: Higher is nearer, under every metric of a store.
    """

    text: str
    source: str
    score: float


@dataclass(frozen=True)
class Reading:
    """What one query's embedding holds; a part is ``None`` until it has been computed.

    Args:
        text: The query.
        cut: Whether the model reads only its beginning.
        embedding: (D) float32.
        hits: The nearest passages, best first.
        tokens: The likeliest tokens at each compression token, without stop words and the query's own words.
        decoded: What the LLM says when it is given the soft prompt alone.
    """

    text: str
    cut: bool = False
    embedding: np.ndarray | None = field(default=None, compare=False, repr=False)
    hits: tuple[Hit, ...] | None = None
    tokens: tuple[LensToken, ...] | None = None
    decoded: str | None = None


@dataclass(frozen=True)
class Step:
    """The state of a computation.

    Args:
        readings: One a query, as far as they are computed.
        doing: What is being computed now; ``None`` when all is there.
    """

    readings: tuple[Reading, ...]
    doing: str | None


class QueryReader:
    """Reads queries with one model and one store, both loaded once; threads take turns.

    Args:
        model: The student.
        store: Where passages are searched; embeds queries with the same student.
        passages: Passages found a query.
        top_k: Tokens shown a compression token.
        max_new_tokens: Longest decoded text, in tokens.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> model = tiny_model()
        >>> store = passages_store(model, [Passage("bees", "insects", "Bees make honey.")])
        >>> reading, = QueryReader(model, store, max_new_tokens=4).read(["who makes honey?"])
        >>> reading.hits[0].text, len(reading.tokens) > 0
        ('Bees make honey.', True)
    """

    def __init__(
        self, model: LLM2VecGen, store: FaissStore, *, passages: int = 3, top_k: int = 5, max_new_tokens: int = 64
    ) -> None:
        self.model = model
        self.store = store
        self._passages = passages
        self._top_k = top_k
        self._max_new_tokens = max_new_tokens
        # A generating LLM and its LoRA layers are not for two threads at once.
        self._model_lock = threading.Lock()

    def read(self, texts: Sequence[str]) -> tuple[Reading, ...]:
        """Everything about some queries.

        Args:
            texts: N queries.

        Returns:
            N readings, complete.

        Raises:
            ValueError: If a query is empty.
            StoreError: If the store cannot be searched.
            FloatingPointError: If a state is not finite.
        """
        *_, last = self.steps(texts)
        return last.readings

    def steps(self, texts: Sequence[str]) -> Iterator[Step]:
        """As :meth:`read`, with what is there so far before each part is computed: the quickest first.

        Yields:
            Steps; the last one is complete.
        """
        texts = [text.strip() for text in texts]
        if not texts or not all(texts):
            raise ValueError("A query is empty: type a question or a few words.")
        readings = [Reading(text, self.model.preview(text, prompt_name=_QUERY).cut) for text in texts]
        yield Step(tuple(readings), "searching passages")
        readings = [self._searched(reading) for reading in readings]
        yield Step(tuple(readings), "looking through the lens")
        with self._model_lock:
            tokens = logit_lens(self.model, texts, top_k=self._top_k, drop=Dropping(), prompt_name=_QUERY)
        readings = [
            replace(reading, tokens=tuple(token for token in tokens if token.input == number))
            for number, reading in enumerate(readings)
        ]
        yield Step(tuple(readings), "decoding")
        with self._model_lock:
            decoded = self.model.decode(texts, prompt_name=_QUERY, max_new_tokens=self._max_new_tokens)
        readings = [replace(reading, decoded=said) for reading, said in zip(readings, decoded, strict=True)]
        yield Step(tuple(readings), None)

    def _searched(self, reading: Reading) -> Reading:
        with self._model_lock:
            vector = self.model.encode(reading.text, prompt_name=_QUERY, show_progress_bar=False)
        found = self.store.similarity_search_with_score_by_vector(vector, k=self._passages)
        hits = tuple(
            Hit(document.page_content, str(document.metadata.get("source", document.id)), score)
            for document, score in found
        )
        return replace(reading, embedding=vector, hits=hits)


def cosine(first: Reading, second: Reading) -> float:
    """Cosine of two queries' embeddings.

    Args:
        first: A reading with its embedding.
        second: Another one.

    Example:
        >>> embeddings = np.eye(2, dtype=np.float32)
        >>> cosine(Reading("a", embedding=embeddings[0]), Reading("b", embedding=embeddings[1]))
        0.0
    """
    assert first.embedding is not None
    assert second.embedding is not None
    lengths = float(np.linalg.norm(first.embedding) * np.linalg.norm(second.embedding))
    return float(first.embedding @ second.embedding) / lengths if lengths else 0.0


def passages_store(model: LLM2VecGen, passages: Sequence[Passage], *, batch_size: int = 16) -> FaissStore:
    """A temporary store of passages, deleted when it is no longer used.

    Args:
        model: The student that embeds them.
        passages: N passages; their topics are kept as metadata.
        batch_size: Passages run at once.

    Raises:
        MissingExtraError: If LangChain or FAISS is not installed.
    """
    for package in ("langchain_core", "faiss"):
        require(package, extra="app", why="a store of passages")
    from langchain_llm2vec_gen import FaissStore, LLM2VecGenEmbeddings

    return FaissStore.from_texts(
        [passage.text for passage in passages],
        LLM2VecGenEmbeddings(model, batch_size=batch_size),
        [{"topic": passage.topic} for passage in passages],
        ids=[passage.id for passage in passages],
    )
