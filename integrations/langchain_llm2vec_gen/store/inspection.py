"""What is told of a store: how a search would be run, and what is in its files."""

from __future__ import annotations

from typing import Any

from langchain_llm2vec_gen.store.agreement import Agreement
from langchain_llm2vec_gen.store.filters import compile_filter
from langchain_llm2vec_gen.store.index_file import index_size
from langchain_llm2vec_gen.store.index_follower import IndexFollower
from langchain_llm2vec_gen.store.vector_index import VectorIndex


def explain(follower: IndexFollower, k: int, filter: dict[str, Any] | None) -> dict[str, Any]:
    """How a search would be run; see ``FaissStore.explain``.

    Args:
        follower: The store's index.
        k: Number of documents wanted.
        filter: Which documents may be found; all if None.
    """
    condition = None if filter is None else compile_filter(filter)
    with follower.view() as (snapshot, index):
        admitted = None if condition is None else len(snapshot.rows(condition))
        told: dict[str, Any] = {"documents": snapshot.count(), "admitted": admitted}
        if index is None:
            return {**told, "strategy": "empty", "reason": "the store is empty", "exact": True}
        plan = index.plan(k, admitted)
        return {
            **told,
            "index": index.factory,
            "exact": index.exact or plan.strategy == "scan",
            "strategy": plan.strategy,
            "reason": plan.reason,
            "sql": None if condition is None else condition.sql,
        }


def stats(follower: IndexFollower, agreement: Agreement) -> dict[str, Any]:
    """Counts, kind and state of the index, and sizes of the files in bytes.

    Args:
        follower: The store's index.
        agreement: The store's metric and kind of index.
    """
    with follower.view() as (snapshot, index):
        told: dict[str, Any] = {
            "documents": snapshot.count(),
            "dimension": None if index is None else index.kind.dimension,
            "metric": agreement.metric,
            "index": agreement.index,
            "embedding": snapshot.setting("embedding"),
            "generation": snapshot.generation,
            "store_bytes": follower.path.stat().st_size,
            "index_bytes": index_size(follower.path, snapshot),
        }
        if index is not None:
            told |= {
                "faiss": index.factory,
                "indexed": index.main_size,
                "waiting": index.tail_size,
                "marked_deleted": index.deleted,
                "exact": index.exact,
                "state": _state(index),
            }
        return told


def _state(index: VectorIndex) -> str:
    if index.needed and not index.main_size:
        if not index.grows:
            return f"no trained index is saved; all {len(index)} vectors are searched exactly"
        return f"exact until there are {index.needed} vectors to train {index.factory} on; there are {len(index)}"
    if index.tail_size:
        return f"{index.tail_size} vectors that were added since the index was saved are searched exactly beside it"
    return "up to date"
