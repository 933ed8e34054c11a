"""AdvBench-IR: how often a retriever hands over harmful passages to those who ask for them (paper, on safety).

520 harmful requests against 1,796 harmful passages, each written for one request. The score is the share of requests
for which one of their own passages is among the top five; lower is safer. The texts of this set are for measuring
only: nothing here prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import datasets
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

NAME = "AdvBench-IR"
_WORDS = 100


def is_advbench(name: str) -> bool:
    """Whether a folder or a task is this set, however its name is spelled.

    Example:
        >>> is_advbench("AdvBenchIR"), is_advbench("advbench-ir"), is_advbench("SciFact")
        (True, True, False)
    """
    return name.lower().replace("-", "").replace("_", "") == "advbenchir"


class AdvBenchIR(AbsTaskRetrieval):
    """The set as an mteb task, from the Hugging Face hub; for a copy in a folder use ``local_tasks``."""

    metadata = TaskMetadata(
        name=NAME,
        description="Harmful requests against harmful passages: share with a hit in the top 5; lower is safer.",
        reference="https://arxiv.org/abs/2503.08644",
        dataset={"path": "McGill-NLP/AdvBench-IR", "revision": "main"},
        type="Retrieval",
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="hit_rate_at_5",
    )

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        """Download the set and cut its documents into passages."""
        if self.data_loaded:
            return
        rows = datasets.load_dataset(**self.metadata.dataset, split="train")
        self.dataset = {"default": {"test": split_data(rows)}}
        self.data_loaded = True


def split_data(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Requests, passages and their relevance, in mteb's shape.

    Args:
        rows: Rows with ``ID``, ``query``, ``title`` and ``document``.

    Returns:
        ``queries``, ``corpus``, ``relevant_docs`` and ``top_ranked`` (``None``).

    Example:
        >>> data = split_data([{"ID": 7, "query": "q", "title": "t", "document": "w " * 250}])
        >>> data["relevant_docs"], len(data["corpus"][0]["text"].split())
        ({'7': {'7-0': 1, '7-1': 1}}, 100)
    """
    queries: list[dict[str, str]] = []
    corpus: list[dict[str, str]] = []
    relevant: dict[str, dict[str, int]] = {}
    for row in rows:
        key = str(row["ID"])
        if key in relevant:
            raise ValueError(f"{NAME}: the id {key!r} occurs twice.")
        ids = []
        for number, passage in enumerate(_passages(row["document"])):
            ids.append(f"{key}-{number}")
            corpus.append({"id": ids[-1], "title": row["title"], "text": passage})
        queries.append({"id": key, "text": row["query"]})
        relevant[key] = dict.fromkeys(ids, 1)
    return {
        "queries": datasets.Dataset.from_list(queries),
        "corpus": datasets.Dataset.from_list(corpus),
        "relevant_docs": relevant,
        "top_ranked": None,
    }


def _passages(document: str) -> Iterator[str]:
    """Passages of 100 words; what is left at the end is dropped, unless it is all there is."""
    words = document.split()
    for start in range(0, max(1, len(words)), _WORDS):
        if start == 0 or start + _WORDS <= len(words):
            yield " ".join(words[start : start + _WORDS])
