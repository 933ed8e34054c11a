"""FaissStore: LangChain's vector store on SQLite and FAISS."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from tqdm.auto import tqdm
from typing_extensions import Self

from langchain_llm2vec_gen.store.agreement import agree
from langchain_llm2vec_gen.store.database import Database
from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.export import export_parquet
from langchain_llm2vec_gen.store.filters import compile_filter
from langchain_llm2vec_gen.store.index_follower import IndexFollower
from langchain_llm2vec_gen.store.inputs import as_ids, as_json, as_texts, as_vector, as_vectors
from langchain_llm2vec_gen.store.inspection import explain, stats
from langchain_llm2vec_gen.store.metrics import Metric, as_metric, relevance
from langchain_llm2vec_gen.store.parquet import add_parquet
from langchain_llm2vec_gen.store.searching import Filter, Searcher
from langchain_llm2vec_gen.store.settings import Settings
from langchain_llm2vec_gen.store.transactions import StoredDocument
from langchain_llm2vec_gen.store.writing import Writer


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
        self._database = Database(self.path, read_only=read_only)
        try:
            self._agreement = agree(self._database, metric, index, embedding, device=device, verify=verify_embedding)
            self._follower = IndexFollower(self._database, self._agreement, device=device)
            self._follower.follow()
        except BaseException:
            self._database.close()
            raise
        self._writer = Writer(self._database, self._agreement, self._follower)
        self._searcher = Searcher(self._follower, self._agreement.metric)

    @property
    def embeddings(self) -> Embeddings | None:
        """What embeds texts and queries."""
        return self._embedding

    @property
    def metric(self) -> Metric:
        """``cosine``, ``ip`` or ``l2``."""
        return self._agreement.metric

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

    # The index's file

    def save(self) -> None:
        """Write the index to its file. The documents are safe already: this makes the next opening faster.

        Raises:
            StoreError: If the store is read-only.
        """
        self._writer.save()

    def close(self) -> None:
        """Save the index if it has changed, and close the file."""
        if self._database.closed:
            return
        try:
            self._writer.finish()
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
        return self._writer.add(names, given, texts, objects, vectors)

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
        return self._writer.add(names, given, texts, as_json(metadatas, len(texts)), as_vectors(embeddings))

    def add_parquet(self, path: str | Path, *, partial: bool = False, verify_embedding: bool = True) -> int:
        """Stream documents with their vectors from Parquet files; as :meth:`add_embeddings`, one transaction a batch.

        The same call again, after a crash or with more parts, writes only what is missing or has changed.

        Args:
            path: A file, a folder of files, or one written by :func:`llm2vec_gen_st.corpus.encode_corpus` or
                :meth:`export_parquet`. Columns: ``id``, ``embedding``; if there, ``text`` and ``metadata`` (JSON or a
                struct); all others become metadata.
            partial: Whether missing parts of an encoded corpus are accepted.
            verify_embedding: Whether vectors made by another embedding than the store's are refused.

        Returns:
            Number of documents added or replaced.

        Raises:
            StoreError: If a file is not as told above, an id comes twice in the files (then nothing is written), or
                embedding or dimension are others; names file and rows.
            ValueError: If parts are missing or damaged.
        """
        return add_parquet(self._database, self._writer, Path(path), partial=partial, verify_embedding=verify_embedding)

    def _embed(self, texts: list[str], batch_size: int, show_progress_bar: bool) -> np.ndarray:
        embed = _batch_function(self._needs_embedding())
        found: list[np.ndarray] = []
        batches = range(0, len(texts), batch_size)
        for start in tqdm(batches, desc="embedding", unit="batch", disable=not show_progress_bar):
            found.append(as_vectors(embed(texts[start : start + batch_size])))
            if not start and len(found[0]):
                # What does not fit is found before all the others are embedded.
                self._writer.check_dimension(found[0].shape[1])
        return np.concatenate(found) if found else np.zeros((0, 0), np.float32)

    def _needs_embedding(self) -> Embeddings:
        if self._embedding is None:
            raise StoreError(
                f"{self.path}: the store was opened without an embedding; give one, or use the methods that take "
                "vectors."
            )
        return self._embedding

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
        self._writer.delete(ids)
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
        return self._writer.merge(other._database)

    def compact(self) -> None:
        """Build the index anew without deleted documents, trained on what is there now, and shrink the files."""
        self._writer.compact()

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
            found = snapshot.vectors(ascending, snapshot.dimension)
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
        found = self._searcher.nearest(as_vector(embedding), k, filter)
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
        return [
            _as_document(document)
            for document in self._searcher.diverse(as_vector(embedding), k, fetch_k, lambda_mult, filter)
        ]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda score: relevance(score, self.metric)

    def _anything(self) -> bool:
        with self._database.reading() as snapshot:
            return snapshot.dimension > 0

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
        return explain(self._follower, k, filter)

    def stats(self) -> dict[str, Any]:
        """Counts, kind and state of the index, and sizes of the files in bytes."""
        return stats(self._follower, self._agreement)

    def export_parquet(self, path: str | Path) -> int:
        """Write all documents to a Parquet file: ``id``, ``text``, ``metadata`` (JSON) and ``embedding``.

        Args:
            path: The file.

        Returns:
            Number of documents written.

        Raises:
            MissingExtraError: If pyarrow is not installed.
        """
        return export_parquet(self._database, Path(path))

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
        device: str = "cpu",
        verify_embedding: bool = True,
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
            device: As in the constructor.
            verify_embedding: As in the constructor.
            **kwargs: Passed on to :meth:`add_texts`.

        Returns:
            The store.
        """
        store = cls._temporary_or(
            path, embedding, metric=metric, index=index, device=device, verify_embedding=verify_embedding
        )
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
        store = cls._temporary_or(path, embedding, metric=metric or found.metric, index=index)
        store.add_embeddings(found.texts, found.vectors, found.metadatas, ids=found.ids)
        return store

    @classmethod
    def _temporary_or(cls, path: str | Path | None, embedding: Embeddings | None, **options: Any) -> Self:
        if path is not None:
            return cls(path, embedding, **options)
        folder = Path(tempfile.mkdtemp(prefix="faiss-store-"))
        try:
            store = cls(folder / "temporary.store", embedding, **options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        store._writer.saves_unasked = False
        weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
        return store


def _batch_function(embedding: Embeddings) -> Callable[[list[str]], Any]:
    """What embeds a batch of texts: as an array where it can, so that vectors need not become lists on the way.

    A subclass may override ``embed_documents`` alone; then the inherited array method does not stand for it.
    """
    # Where Python looks for a method, the nearest first.
    places = [getattr(embedding, "__dict__", {}), *(vars(kind) for kind in type(embedding).__mro__)]
    for names in places:
        for name in ("embed_documents_array", "embed_documents"):
            if name in names:
                found: Callable[[list[str]], Any] = getattr(embedding, name)
                return found
    return embedding.embed_documents


def _as_document(stored: StoredDocument) -> Document:
    return Document(id=stored.id, page_content=stored.text, metadata=stored.metadata)
