"""Adding, replacing, deleting and merging documents, and saving the index of what was written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from langchain_llm2vec_gen.store.agreement import Agreement
from langchain_llm2vec_gen.store.database import Database
from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.index_follower import Change, IndexFollower
from langchain_llm2vec_gen.store.inputs import as_json
from langchain_llm2vec_gen.store.transactions import Snapshot, Transaction

logger = logging.getLogger(__name__)

_UNSAVED_AT_MOST = 20_000
# What may befall the index once a change is written; raised, it would have the caller write the same documents again.
_BESIDE_THE_STORE = (OSError, RuntimeError, MemoryError)


class Writer:
    """Writes to a store, each change in one transaction, for one thread at a time.

    Args:
        database: The store's file.
        agreement: Its metric and kind of index.
        follower: Its index, which is brought up to each change.
    """

    def __init__(self, database: Database, agreement: Agreement, follower: IndexFollower) -> None:
        self._database = database
        self._agreement = agreement
        self._follower = follower
        self._one_at_a_time = threading.RLock()
        # Whether the index is saved when much of it is not in its file, and on closing.
        self.saves_unasked = True
        # How many vectors were unsaved when that failed last.
        self._failed_at = 0

    def add(
        self, ids: list[str], given: bool, texts: list[str], metadatas: list[str], vectors: np.ndarray
    ) -> list[str]:
        """Add documents, all or none.

        Args:
            ids: N identifiers, all different.
            given: Whether some of them may be known already; those documents are replaced.
            texts: N texts.
            metadatas: N JSON objects.
            vectors: (N, D) float32.

        Returns:
            The identifiers.

        Raises:
            ValueError: If there are more or fewer vectors, or of another dimension than the store's.
        """
        if len(vectors) != len(texts):
            raise ValueError(f"There are {len(texts)} texts but {len(vectors)} embeddings.")
        if not texts:
            return []
        with self._one_at_a_time:
            with self._database.changing() as transaction:
                self._agree_on_dimension(transaction, vectors.shape[1])
                replaced = list(transaction.rows_of(ids).values()) if given else []
                generation = transaction.next_generation()
                transaction.remove(replaced, generation)
                rows = transaction.add(ids, texts, metadatas, vectors)
            self._take_over(Change(generation, rows, vectors, replaced))
            self._follower.unsaved += len(rows)
            if self._follower.unsaved - self._failed_at > max(_UNSAVED_AT_MOST, self._count() // 2):
                self._save_unasked()
        return ids

    def _take_over(self, change: Change | None = None) -> None:
        """Have the index follow a change; that it cannot is no failure of the change, which is written already."""
        try:
            self._follower.follow(change)
        except _BESIDE_THE_STORE as error:
            logger.warning(
                "%s: the index could not take over a change (%s: %s). The change is safe in the store; the next search "
                "builds the index again.",
                self._database.path,
                type(error).__name__,
                error,
            )

    def _save_unasked(self) -> None:
        """Save the index; that it cannot be saved is no failure of what was asked for, which is written already."""
        if not self.saves_unasked:
            return
        try:
            self.save()
        except (*_BESIDE_THE_STORE, StoreError) as error:
            self._failed_at = self._follower.unsaved
            logger.warning(
                "%s: the index could not be written to its file (%s: %s). All documents are safe in the store, and the "
                "index is written later; until then the store takes longer to open. Make room for the file beside the "
                "store, or let it be written to.",
                self._database.path,
                type(error).__name__,
                error,
            )

    def _count(self) -> int:
        with self._database.reading() as snapshot:
            return snapshot.count()

    def _agree_on_dimension(self, transaction: Transaction, dimension: int) -> None:
        self._check_dimension(transaction, dimension)
        if not transaction.dimension:
            transaction.set("dimension", str(dimension))

    def check_dimension(self, dimension: int) -> None:
        """Refuse vectors that could not be added.

        Raises:
            ValueError: If the store's have another dimension, or its kind of index cannot be built for this one.
        """
        with self._database.reading() as snapshot:
            self._check_dimension(snapshot, dimension)

    def _check_dimension(self, snapshot: Snapshot, dimension: int) -> None:
        found = snapshot.dimension
        if not found:
            self._agreement.kind(dimension)
        elif found != dimension:
            raise ValueError(
                f"{self._database.path}: the store's vectors have {found} dimensions, the ones given {dimension}. "
                "Nothing was written; use the embedding that made the store, or a new store."
            )

    def delete(self, ids: Sequence[str] | None) -> None:
        """Delete documents; ids that are not there are passed over.

        Args:
            ids: Identifiers; all documents if None.
        """
        with self._one_at_a_time:
            with self._database.changing() as transaction:
                rows = transaction.rows().tolist() if ids is None else list(transaction.rows_of(list(ids)).values())
                if not rows:
                    return
                generation = transaction.next_generation()
                transaction.remove(rows, generation)
            nothing = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
            self._take_over(Change(generation, *nothing, removed=rows))

    def merge(self, other: Database) -> int:
        """Add all documents of another store, all or none.

        Args:
            other: The other store's file.

        Returns:
            Number of documents added.

        Raises:
            ValueError: If ids are in both stores, or dimension or embedding differ; nothing is written then.
        """
        with self._one_at_a_time, other.reading() as theirs:
            if not theirs.dimension:
                return 0
            count = 0
            with self._database.changing() as transaction:
                self._agree_on_dimension(transaction, theirs.dimension)
                makers = transaction.setting("embedding"), theirs.setting("embedding")
                if None not in makers and makers[0] != makers[1]:
                    raise StoreError(
                        f"{self._database.path} was made by the embedding {makers[0]}, {other.path} by {makers[1]}."
                    )
                if makers[0] is None:
                    transaction.set("embedding", makers[1])
                transaction.next_generation()
                for documents, vectors in theirs.documents_with_vectors():
                    ids = [document.id for document in documents]
                    if known := sorted(transaction.rows_of(ids)):
                        raise ValueError(
                            f"{len(known)} ids are in both stores, such as {known[0]!r}; nothing was written."
                        )
                    metadatas = as_json([document.metadata for document in documents], len(documents))
                    transaction.add(ids, [document.text for document in documents], metadatas, vectors)
                    count += len(ids)
            self._take_over()
            self._follower.unsaved += count
        return count

    def compact(self) -> None:
        """Build the index anew without deleted documents, trained on what is there now, and shrink the files."""
        with self._one_at_a_time:
            with self._database.changing() as transaction:
                transaction.next_generation()
                transaction.forget_deleted()
            self._database.shrink()
            self._follower.rebuild()
            self._save_unasked()

    def save(self) -> None:
        """Write the index to its file.

        Raises:
            StoreError: If the store is read-only.
        """
        with self._one_at_a_time:
            self._follower.save()
            self._failed_at = 0

    def finish(self) -> None:
        """Save what is still to be saved before the store is closed."""
        if self._follower.unsaved and not self._database.read_only:
            self._save_unasked()
