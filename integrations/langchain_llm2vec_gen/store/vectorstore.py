"""FaissStore: LangChain's vector store on SQLite and FAISS."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from tqdm.auto import tqdm
from typing_extensions import Self

from langchain_llm2vec_gen.store.database import Database, Settings, Snapshot, StoredDocument, Transaction
from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.filters import Condition, canonical, compile_filter
from langchain_llm2vec_gen.store.index_file import drop_other_files, index_size, is_replaced, read_index, write_index
from langchain_llm2vec_gen.store.inputs import as_ids, as_json, as_texts, as_vector, as_vectors
from langchain_llm2vec_gen.store.kinds import Kind
from langchain_llm2vec_gen.store.locks import ReadWriteLock
from langchain_llm2vec_gen.store.metrics import Metric, as_metric, prepared, relevance
from langchain_llm2vec_gen.store.mmr import diverse
from langchain_llm2vec_gen.store.vector_index import VectorIndex
from llm2vec_gen_st.extras import require

logger = logging.getLogger(__name__)

Filter = dict[str, Any]

_REMEMBERED_FILTERS = 32
_UNSAVED_AT_MOST = 20_000
_EXPORTED_AT_ONCE = 4096


@dataclass(frozen=True)
class _Change:
    """A change that this process made itself, so that its index need not read it back."""

    generation: int
    rows: np.ndarray
    vectors: np.ndarray
    removed: list[int]


class FaissStore(VectorStore):
    """Documents, metadata and vectors in one SQLite file, searched with FAISS.

    The file is the truth, changed in transactions. The FAISS index beside it is derived from it: checked when it is
    read, brought up to date when it is behind, and built again when it is missing or damaged. Threads share one store;
    processes share one file, one of them writing at a time. In all results a higher score is nearer.

    Args:
        path: The SQLite file; created if it is not there.
        embedding: Embeds texts and queries; not needed for ready-made vectors.
        metric: ``cosine``, ``ip`` (inner product) or ``l2``; scores are cosines, inner products or negative distances.
            What the store has if not given, cosine for a new one.
        index: ``flat`` (exact), ``hnsw``, ``ivf``, ``ivfpq``, or any string of FAISS's ``index_factory``. What the
            store has if not given, flat for a new one. A metric or index other than the store's replaces it.
        device: ``cuda`` searches a copy of the index on a GPU; it is saved as a CPU index in any case.
        read_only: Whether the store is only read; any number of processes then share one memory-mapped index.
        verify_embedding: Whether an embedding other than the one that made the store is refused.

    Raises:
        StoreError: If the file is not a store, is damaged, or was made by another embedding.
        ValueError: If metric, index or device are not known.
        FileNotFoundError: If the store is to be read and is not there.

    Example:
        >>> import tempfile
        >>> store = FaissStore(tempfile.mkdtemp() + "/corpus.store")
        >>> store.add_embeddings(["north", "east"], [[0, 1], [1, 0]], [{"year": 1}, {"year": 2}], ids=["n", "e"])
        ['n', 'e']
        >>> [document.id for document in store.similarity_search_by_vector([0.1, 0.9], k=1)]
        ['n']
        >>> store.similarity_search_by_vector([0, 1], k=1, filter={"year": {"$gt": 1}})[0].page_content
        'east'
        >>> store.close()
    """

    def __init__(
        self,
        path: str | Path,
        embedding: Embeddings | None = None,
        *,
        metric: Metric | None = None,
        index: str | None = None,
        device: str = "cpu",
        read_only: bool = False,
        verify_embedding: bool = True,
    ) -> None:
        if metric is not None:
            as_metric(metric)
        self.path = Path(path)
        self.read_only = read_only
        self._embedding = embedding
        self._device = device
        self._lock = ReadWriteLock()
        self._one_writer = threading.RLock()
        self._filters: OrderedDict[str, tuple[int, np.ndarray]] = OrderedDict()
        self._filters_lock = threading.Lock()
        self._index: VectorIndex | None = None
        self._generation = -1
        self._unsaved = 0
        self._temporary: Path | None = None
        self._database = Database(self.path, read_only=read_only)
        try:
            self._agree(metric, index, verify_embedding)
            self._sync()
        except BaseException:
            self._database.close()
            raise

    # Opening

    def _agree(self, metric: Metric | None, index: str | None, verify_embedding: bool) -> None:
        """Settle metric, index and embedding between what the store says and what was asked for."""
        with self._database.reading() as snapshot:
            found = snapshot.settings()
        wanted = {
            "metric": metric or found.get("metric", "cosine"),
            "index": index or found.get("index", "flat"),
        }
        self._metric = as_metric(wanted["metric"])
        self._kind_name = wanted["index"]
        if "dimension" in found:
            Kind(self._kind_name, int(found["dimension"]), self._metric)
        made_by, ours = found.get("embedding"), _fingerprint(self._embedding)
        if verify_embedding and made_by is not None and ours is not None and made_by != ours:
            raise StoreError(
                f"{self.path}: its vectors were made by the embedding {made_by}, and the one given is {ours}; their "
                "vectors cannot be compared. Give the same embedding, or verify_embedding=False if you know better."
            )
        changed = {key: value for key, value in wanted.items() if found.get(key) != value}
        if self.read_only:
            if changed and "metric" in found:
                told = ", ".join(f"{key} {found[key]!r}, not {value!r}" for key, value in changed.items())
                raise StoreError(f"{self.path}: the store has {told}; open it without read_only to change that.")
            return
        if made_by is None and ours is not None:
            changed["embedding"] = ours
        if changed:
            with self._database.changing() as transaction:
                for key, value in changed.items():
                    transaction.set(key, value)

    @property
    def embeddings(self) -> Embeddings | None:
        """What embeds texts and queries."""
        return self._embedding

    @property
    def metric(self) -> Metric:
        """``cosine``, ``ip`` or ``l2``."""
        return self._metric

    @property
    def settings(self) -> Settings:
        """Texts by name that are kept in the store, for its user's own use."""
        return Settings(self._database)

    @staticmethod
    def stored_settings(path: str | Path) -> dict[str, str]:
        """What :attr:`settings` holds in a store's file, without opening its index.

        Raises:
            FileNotFoundError: If there is no such file.
            StoreError: If it is not a store.
        """
        with closing(Database(Path(path), read_only=True)) as database:
            return dict(Settings(database))

    # The index and the file

    def _sync(self, change: _Change | None = None) -> None:
        """Bring the index to the state of the file."""
        with self._lock.writing():
            while not self._synced(change):
                logger.debug("%s: another process has replaced the index meanwhile; trying again.", self.path)

    def _synced(self, change: _Change | None) -> bool:
        """Bring the index to one snapshot of the file; False if its index file is gone because there is a newer one."""
        with self._database.reading() as snapshot:
            generation = snapshot.generation
            if generation == self._generation:
                return True
            dimension = int(snapshot.setting("dimension") or 0)
            with self._database.reading() as now:
                if self._index is None and is_replaced(self.path, snapshot, now):
                    return False
            try:
                if dimension:
                    self._follow(snapshot, dimension, change)
            except BaseException:
                # Half a change must not be searched: the next search begins anew.
                self._index, self._generation = None, -1
                raise
            self._generation = generation
            return True

    def _follow(self, snapshot: Snapshot, dimension: int, change: _Change | None) -> None:
        """Take over what was written since the index was last brought up to date."""
        forgotten = int(snapshot.setting("forgotten_generation") or 0)
        if self._index is None or self._generation < forgotten:
            self._index = self._opened_index(snapshot, dimension)
        elif change is not None and change.generation == snapshot.generation == self._generation + 1:
            self._index.remove(change.removed)
            self._index.add(change.rows, change.vectors)
        else:
            for rows, vectors in snapshot.vectors_after(self._index.last_row, dimension):
                self._index.add(rows, vectors)
            self._index.remove(snapshot.deleted_since(self._generation))
        before = self._index.trained_on
        self._index.maintain(lambda: snapshot.vectors_after(0, dimension))
        if self._index.trained_on != before:
            self._unsaved = self._index.main_size

    def _opened_index(self, snapshot: Snapshot, dimension: int) -> VectorIndex:
        """The index from its file, brought up to the snapshot."""
        kind = Kind(self._kind_name, dimension, self._metric)
        index = VectorIndex(kind, device=self._device, grows=not self.read_only)
        read_index(self.path, snapshot, index, mapped=self.read_only)
        for rows, vectors in snapshot.vectors_after(index.last_row, dimension):
            index.add(rows, vectors)
            self._unsaved += len(rows)
        return index

    def save(self) -> None:
        """Write the index to its file. The documents are safe already: this makes the next opening faster.

        Raises:
            StoreError: If the store is read-only.
        """
        with self._one_writer:
            self._sync()
            with self._lock.reading(), self._database.changing() as transaction:
                if self._index is not None:
                    write_index(self.path, transaction, self._index)
            with self._database.changing() as transaction:
                drop_other_files(self.path, transaction)
            self._unsaved = 0

    def close(self) -> None:
        """Save the index if it has changed, and close the file."""
        if self._database.closed:
            return
        try:
            if not self.read_only and self._temporary is None and self._unsaved:
                self.save()
        finally:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Writing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: Sequence[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int = 64,
        show_progress_bar: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Embed texts and add them, all or none; a document whose id is known replaces the old one.

        Args:
            texts: N texts.
            metadatas: N dictionaries that JSON can hold.
            ids: N identifiers; new ones where None.
            batch_size: Texts given to the embedding at once.
            show_progress_bar: Whether a progress bar is shown while texts are embedded.
            **kwargs: Not used.

        Returns:
            The identifiers.

        Raises:
            ValueError: If numbers differ, an id comes twice, or metadata is not JSON; nothing is written then.
        """
        texts = as_texts(texts)
        names, given = as_ids(ids, len(texts))
        objects = as_json(metadatas, len(texts))
        vectors = self._embed(texts, batch_size, show_progress_bar)
        return self._write(names, given, texts, objects, vectors)

    def add_embeddings(
        self,
        texts: Iterable[str],
        embeddings: Any,
        metadatas: Sequence[dict[str, Any]] | None = None,
        ids: Sequence[str | None] | None = None,
    ) -> list[str]:
        """Add texts with ready-made vectors; as :meth:`add_texts` without the embedding.

        Args:
            texts: N texts.
            embeddings: (N, D) numbers: lists, an array of any float type, a torch tensor, or a memory map.
            metadatas: N dictionaries that JSON can hold.
            ids: N identifiers; new ones where None.

        Returns:
            The identifiers.

        Raises:
            ValueError: If numbers or dimensions differ, an id comes twice, or a value is not finite.
        """
        texts = as_texts(texts)
        names, given = as_ids(ids, len(texts))
        return self._write(names, given, texts, as_json(metadatas, len(texts)), as_vectors(embeddings))

    def _embed(self, texts: list[str], batch_size: int, show_progress_bar: bool) -> np.ndarray:
        embedding = self._needs_embedding()
        # Ours also gives arrays, which need not become lists of numbers on the way.
        embed = getattr(embedding, "embed_documents_array", embedding.embed_documents)
        found: list[np.ndarray] = []
        batches = range(0, len(texts), batch_size)
        for start in tqdm(batches, desc="embedding", unit="batch", disable=not show_progress_bar):
            found.append(as_vectors(embed(texts[start : start + batch_size])))
        return np.concatenate(found) if found else np.zeros((0, 0), np.float32)

    def _needs_embedding(self) -> Embeddings:
        if self._embedding is None:
            raise StoreError(
                f"{self.path}: the store was opened without an embedding; give one, or use the methods that take "
                "vectors."
            )
        return self._embedding

    def _write(
        self, ids: list[str], given: bool, texts: list[str], metadatas: list[str], vectors: np.ndarray
    ) -> list[str]:
        if len(vectors) != len(texts):
            raise ValueError(f"There are {len(texts)} texts but {len(vectors)} embeddings.")
        if not texts:
            return []
        with self._one_writer:
            with self._database.changing() as transaction:
                self._agree_on_dimension(transaction, vectors.shape[1])
                replaced = list(transaction.rows_of(ids).values()) if given else []
                generation = transaction.next_generation()
                transaction.remove(replaced, generation)
                rows = transaction.add(ids, texts, metadatas, vectors)
            self._sync(_Change(generation, rows, vectors, replaced))
            self._unsaved += len(rows)
            if self._temporary is None and self._unsaved > max(_UNSAVED_AT_MOST, len(self) // 2):
                self.save()
        return ids

    def _agree_on_dimension(self, transaction: Transaction, dimension: int) -> None:
        found = transaction.setting("dimension")
        if found is None:
            Kind(self._kind_name, dimension, self._metric)
            transaction.set("dimension", str(dimension))
        elif int(found) != dimension:
            raise ValueError(
                f"{self.path}: the store's vectors have {found} dimensions, the ones given {dimension}. Nothing was "
                "written; use the embedding that made the store, or a new store."
            )

    def delete(self, ids: Sequence[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents; ids that are not there are passed over.

        Args:
            ids: Identifiers; all documents if None.
            **kwargs: Not used.

        Returns:
            True: none of them is there any more.
        """
        if isinstance(ids, str):
            raise TypeError("ids must be a list of identifiers, not one text.")
        with self._one_writer:
            with self._database.changing() as transaction:
                rows = transaction.rows().tolist() if ids is None else list(transaction.rows_of(list(ids)).values())
                if not rows:
                    return True
                generation = transaction.next_generation()
                transaction.remove(rows, generation)
            nothing = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
            self._sync(_Change(generation, *nothing, removed=rows))
        return True

    def merge_from(self, other: FaissStore) -> int:
        """Add all documents of another store, all or none.

        Args:
            other: A store of the same dimension, made by the same embedding.

        Returns:
            Number of documents added.

        Raises:
            ValueError: If ids are in both stores, or dimension or embedding differ; nothing is written then.
        """
        with self._one_writer, other._database.reading() as theirs:
            dimension = int(theirs.setting("dimension") or 0)
            if not dimension:
                return 0
            count = 0
            with self._database.changing() as transaction:
                self._agree_on_dimension(transaction, dimension)
                makers = transaction.setting("embedding"), theirs.setting("embedding")
                if None not in makers and makers[0] != makers[1]:
                    raise StoreError(f"{self.path} was made by the embedding {makers[0]}, {other.path} by {makers[1]}.")
                transaction.next_generation()
                for rows, vectors in theirs.vectors_after(0, dimension):
                    documents = [theirs.documents(rows.tolist())[row] for row in rows.tolist()]
                    ids = [document.id for document in documents]
                    if known := sorted(transaction.rows_of(ids)):
                        raise ValueError(
                            f"{len(known)} ids are in both stores, such as {known[0]!r}; nothing was written."
                        )
                    metadatas = as_json([document.metadata for document in documents], len(documents))
                    transaction.add(ids, [document.text for document in documents], metadatas, vectors)
                    count += len(ids)
            self._sync()
            self._unsaved += count
        return count

    def compact(self) -> None:
        """Build the index anew without deleted documents, trained on what is there now, and shrink the files."""
        with self._one_writer:
            with self._database.changing() as transaction:
                transaction.next_generation()
                transaction.forget_deleted()
            self._database.shrink()
            with self._lock.writing(), self._database.reading() as snapshot:
                dimension = int(snapshot.setting("dimension") or 0)
                if dimension:
                    kind = Kind(self._kind_name, dimension, self._metric)
                    self._index = VectorIndex(kind, device=self._device)
                    self._index.rebuild(snapshot.vectors_after(0, dimension))
                self._generation = snapshot.generation
            if self._temporary is None:
                self.save()

    # Reading

    def __len__(self) -> int:
        with self._database.reading() as snapshot:
            return snapshot.count()

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents by identifier, in the order asked for; ids that are not there are passed over."""
        with self._database.reading() as snapshot:
            rows = snapshot.rows_of(list(ids))
            found = snapshot.documents(list(rows.values()))
        return [_as_document(found[rows[id]]) for id in ids if id in rows]

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """Stored vectors (N, D) float32 of documents, in the order of their ids.

        Raises:
            KeyError: If an id is not there; names the first.
        """
        with self._database.reading() as snapshot:
            rows = snapshot.rows_of(list(ids))
            if missing := [id for id in ids if id not in rows]:
                raise KeyError(missing[0])
            places = np.array([rows[id] for id in ids], dtype=np.int64)
            ascending = np.unique(places)
            found = snapshot.vectors(ascending, int(snapshot.setting("dimension") or 0))
        return found[np.searchsorted(ascending, places)]

    def ids(self, filter: Filter | None = None) -> list[str]:
        """Identifiers of all documents, or of those that a filter admits, in the order in which they were added."""
        return [str(document.id) for document in self.documents(filter)]

    def documents(self, filter: Filter | None = None) -> Iterator[Document]:
        """All documents, or those that a filter admits, in the order in which they were added."""
        condition = None if filter is None else compile_filter(filter)
        with self._database.reading() as snapshot:
            yield from map(_as_document, snapshot.all_documents(condition))

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any) -> list[Document]:
        """The nearest documents, best first.

        Args:
            query: The text to search for.
            k: Number of documents wanted.
            filter: Which documents may be found, by metadata; see
                :func:`~langchain_llm2vec_gen.store.filters.compile_filter`.
            **kwargs: Not used.

        Returns:
            min(k, documents admitted) documents.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The nearest documents with their scores; a higher score is nearer under every metric."""
        if not self._anything():
            return []
        return self.similarity_search_with_score_by_vector(self._needs_embedding().embed_query(query), k, filter)

    def similarity_search_by_vector(
        self, embedding: Any, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The documents nearest to a vector (D)."""
        return [document for document, _ in self.similarity_search_with_score_by_vector(embedding, k, filter)]

    def similarity_search_with_score_by_vector(
        self, embedding: Any, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The documents nearest to a vector (D), with their scores."""
        found = self._search(as_vector(embedding), k, filter)
        return [(_as_document(document), score) for document, score in found]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Documents near the query and unlike each other.

        Args:
            query: The text to search for.
            k: Number of documents wanted.
            fetch_k: Number of nearest documents they are chosen from.
            lambda_mult: 1 looks at nearness alone, 0 at diversity alone.
            filter: Which documents may be found.
            **kwargs: Not used.

        Returns:
            min(k, documents admitted) documents.
        """
        if not self._anything():
            return []
        vector = self._needs_embedding().embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: Any,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """As :meth:`max_marginal_relevance_search`, for a vector (D)."""
        query = as_vector(embedding)

        def choose(snapshot: Snapshot, rows: np.ndarray) -> np.ndarray:
            order = np.sort(rows)
            vectors = prepared(snapshot.vectors(order, len(query)), self._metric)[np.searchsorted(order, rows)]
            return rows[diverse(prepared(query[None], self._metric)[0], vectors, k, lambda_mult, self._metric)]

        found = self._search(query, max(k, fetch_k), filter, choose=choose)
        return [_as_document(document) for document, _ in found]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda score: relevance(score, self._metric)

    def _anything(self) -> bool:
        with self._database.reading() as snapshot:
            return snapshot.setting("dimension") is not None

    def _search(
        self,
        query: np.ndarray,
        k: int,
        filter: Filter | None,
        choose: Callable[[Snapshot, np.ndarray], np.ndarray] | None = None,
    ) -> list[tuple[StoredDocument, float]]:
        """Nearest documents and scores, in one consistent view of index and file."""
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}.")
        condition = None if filter is None else compile_filter(filter)
        while True:
            with self._lock.reading(), self._database.reading() as snapshot:
                if snapshot.generation == self._generation:
                    index = self._index
                    if index is None or not k:
                        return []
                    self._check_query(query, index)
                    admitted = self._admitted(snapshot, filter, condition)
                    rows, scores = index.search(query, k, admitted, partial(snapshot.vectors, dimension=len(query)))
                    by_row = dict(zip(rows.tolist(), scores.tolist(), strict=True))
                    if choose is not None and len(rows):
                        rows = choose(snapshot, rows)
                    found = snapshot.documents(rows.tolist())
                    return [(found[row], by_row[row]) for row in rows.tolist()]
            # Something was written since: first bring the index up to it.
            self._sync()

    def _check_query(self, query: np.ndarray, index: VectorIndex) -> None:
        if len(query) != index.kind.dimension:
            raise ValueError(
                f"{self.path}: the store's vectors have {index.kind.dimension} dimensions, the query's has "
                f"{len(query)}."
            )

    def _admitted(self, snapshot: Snapshot, filter: Filter | None, condition: Condition | None) -> np.ndarray | None:
        """Rows that a filter admits; remembered as long as nothing is written."""
        if filter is None or condition is None:
            return None
        key, generation = canonical(filter), snapshot.generation
        with self._filters_lock:
            known = self._filters.get(key)
            if known is not None and known[0] == generation:
                self._filters.move_to_end(key)
                return known[1]
        rows = snapshot.rows(condition)
        with self._filters_lock:
            self._filters[key] = (generation, rows)
            while len(self._filters) > _REMEMBERED_FILTERS:
                self._filters.popitem(last=False)
        return rows

    # Looking into it

    def explain(self, k: int = 4, filter: Filter | None = None) -> dict[str, Any]:
        """How a search would be run.

        Args:
            k: Number of documents wanted.
            filter: Which documents may be found.

        Returns:
            ``index``, ``exact``, ``documents``, ``admitted``, ``strategy`` (``scan``, ``selector``, ``full`` or
            ``empty``), ``reason``, and the ``sql`` of the filter.
        """
        condition = None if filter is None else compile_filter(filter)
        self._sync()
        with self._lock.reading(), self._database.reading() as snapshot:
            admitted = None if condition is None else len(snapshot.rows(condition))
            told: dict[str, Any] = {"documents": snapshot.count(), "admitted": admitted}
            if self._index is None:
                return {**told, "strategy": "empty", "reason": "the store is empty", "exact": True}
            plan = self._index.plan(k, admitted)
            return {
                **told,
                "index": self._index.factory,
                "exact": self._index.exact or plan.strategy == "scan",
                "strategy": plan.strategy,
                "reason": plan.reason,
                "sql": None if condition is None else condition.sql,
            }

    def stats(self) -> dict[str, Any]:
        """Counts, kind and state of the index, and sizes of the files in bytes."""
        self._sync()
        with self._lock.reading(), self._database.reading() as snapshot:
            index = self._index
            told: dict[str, Any] = {
                "documents": snapshot.count(),
                "dimension": None if index is None else index.kind.dimension,
                "metric": self._metric,
                "index": self._kind_name,
                "embedding": snapshot.setting("embedding"),
                "generation": snapshot.generation,
                "store_bytes": self.path.stat().st_size,
                "index_bytes": index_size(self.path, snapshot),
            }
            if index is not None:
                told |= {
                    "faiss": index.factory,
                    "indexed": index.main_size,
                    "waiting": index.tail_size,
                    "marked_deleted": index.deleted,
                    "exact": index.exact,
                    "state": _state(index, self.read_only),
                }
            return told

    def export_parquet(self, path: str | Path) -> int:
        """Write all documents to a Parquet file: ``id``, ``text``, ``metadata`` (JSON) and ``embedding``.

        Args:
            path: The file.

        Returns:
            Number of documents written.

        Raises:
            MissingExtraError: If pyarrow is not installed.
        """
        pyarrow = require("pyarrow", extra="train", why="exporting to Parquet")
        parquet = require("pyarrow.parquet", extra="train", why="exporting to Parquet")
        from llm2vec_gen_st.files import write_atomically

        count = 0

        def write(temporary: Path) -> None:
            nonlocal count
            with self._database.reading() as snapshot:
                dimension = int(snapshot.setting("dimension") or 0)
                schema = pyarrow.schema(
                    [
                        *((name, pyarrow.string()) for name in ("id", "text", "metadata")),
                        ("embedding", pyarrow.list_(pyarrow.float32(), dimension)),
                    ]
                )
                with parquet.ParquetWriter(temporary, schema) as writer:
                    for rows, vectors in snapshot.vectors_after(0, dimension) if dimension else ():
                        found = snapshot.documents(rows.tolist())
                        documents = [found[row] for row in rows.tolist()]
                        columns = [
                            pyarrow.array([document.id for document in documents]),
                            pyarrow.array([document.text for document in documents]),
                            pyarrow.array([json.dumps(document.metadata) for document in documents]),
                            pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), dimension),
                        ]
                        writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
                        count += len(documents)

        write_atomically(Path(path), write)
        return count

    # Making one

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        embedding: Embeddings,
        metadatas: Sequence[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        path: str | Path | None = None,
        metric: Metric | None = None,
        index: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a store of texts.

        Args:
            texts: N texts.
            embedding: Embeds them.
            metadatas: N dictionaries.
            ids: N identifiers.
            path: The file; if None, a temporary one that is deleted with the store.
            metric: As in the constructor.
            index: As in the constructor.
            **kwargs: Passed on to :meth:`add_texts`.

        Returns:
            The store.
        """
        store = cls._temporary_or(path, embedding, metric, index)
        store.add_texts(texts, metadatas, ids=ids, **kwargs)
        return store

    @classmethod
    def from_langchain_community(
        cls,
        folder: str | Path,
        path: str | Path | None = None,
        embedding: Embeddings | None = None,
        *,
        index_name: str = "index",
        metric: Metric | None = None,
        index: str | None = None,
    ) -> Self:
        """Read a folder that langchain-community's FAISS store has saved, without running its pickle.

        Args:
            folder: The folder with ``index.faiss`` and ``index.pkl``.
            path: The new store's file; if None, a temporary one.
            embedding: The embedding that made the folder's vectors.
            index_name: Name of the two files without ending.
            metric: As in the constructor; the folder's own if not given.
            index: As in the constructor.

        Returns:
            The store, with the folder's ids, texts, metadata and vectors.

        Raises:
            ValueError: If the pickle holds anything but documents, or the folder is not consistent.
        """
        from langchain_llm2vec_gen.community import read_community_folder

        found = read_community_folder(folder, index_name)
        store = cls._temporary_or(path, embedding, metric or found.metric, index)
        store.add_embeddings(found.texts, found.vectors, found.metadatas, ids=found.ids)
        return store

    @classmethod
    def _temporary_or(
        cls, path: str | Path | None, embedding: Embeddings | None, metric: Metric | None, index: str | None
    ) -> Self:
        if path is not None:
            return cls(path, embedding, metric=metric, index=index)
        folder = Path(tempfile.mkdtemp(prefix="faiss-store-"))
        store = cls(folder / "temporary.store", embedding, metric=metric, index=index)
        store._temporary = folder
        weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
        return store


def _as_document(stored: StoredDocument) -> Document:
    return Document(id=stored.id, page_content=stored.text, metadata=stored.metadata)


def _state(index: VectorIndex, read_only: bool) -> str:
    if index.needed and not index.main_size:
        if read_only:
            return f"no trained index is saved; all {len(index)} vectors are searched exactly"
        return f"exact until there are {index.needed} vectors to train {index.factory} on; there are {len(index)}"
    if index.tail_size:
        return f"{index.tail_size} vectors that were added since the index was saved are searched exactly beside it"
    return "up to date"


def _fingerprint(embedding: Embeddings | None) -> str | None:
    """What tells one embedding from another: its own fingerprint, or its class and the name of its model."""
    if embedding is None:
        return None
    own = getattr(embedding, "fingerprint", None)
    if isinstance(own, str):
        return own
    names = (getattr(embedding, name, None) for name in ("model", "model_name", "model_id"))
    model = next((name for name in names if isinstance(name, str)), None)
    kind = f"{type(embedding).__module__}.{type(embedding).__qualname__}"
    return kind if model is None else f"{kind}({model})"
