"""A folder of JSON lines as mteb tasks: what kind of task it is, is told from its files and their columns.

===================  =============================================================================================
kind                 files and columns
===================  =============================================================================================
retrieval            ``queries.jsonl`` (``_id``, ``text``), ``corpus.jsonl`` (``_id``, ``text``, perhaps ``title``),
                     ``qrels.tsv`` (``query-id``, ``corpus-id``, ``score``, with this header)
reranking            ``test.jsonl`` with ``query``, ``positive`` and ``negative`` (lists of texts)
STS                  ``test.jsonl`` with ``sentence1``, ``sentence2``, ``score``
pair classification  ``test.jsonl`` with ``sentence1``, ``sentence2``, ``label`` (0 or 1)
classification       ``test.jsonl`` and ``train.jsonl`` with ``text``, ``label``
clustering           ``test.jsonl`` with ``text``, ``label``, without ``train.jsonl``
===================  =============================================================================================

Files may be gzip-compressed (``.jsonl.gz``). A folder of the name ``AdvBench-IR`` is scored as that set is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks import (
    AbsTask,
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
)
from mteb.abstasks.task_metadata import TaskMetadata

from llm2vec_gen_st.evaluation.advbench import AdvBenchIR, is_advbench
from llm2vec_gen_st.files import read_jsonl
from llm2vec_gen_st.text import without_lone_surrogates

Rows = list[dict[str, Any]]

TEST_SPLIT = "test"
_DEV_SPLITS = ("dev", "validation")
_RETRIEVAL_FILES = ("queries", "corpus")
_QRELS = "qrels.tsv"
_QRELS_COLUMNS = ["query-id", "corpus-id", "score"]


def local_tasks(folder: str | Path, *, split: str = TEST_SPLIT) -> list[AbsTask]:
    """The tasks in a folder: itself, if it holds the files of one, or those of its subfolders that do.

    Args:
        folder: The folder.
        split: ``test``, or ``dev`` for the rows on which choices are made (``dev.jsonl`` or ``validation.jsonl``);
            retrieval tasks have no other rows than those of their one set of files.

    Returns:
        mteb tasks, by name of their folder.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it holds no task, or a file is not what it should be; names file and row.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder of tasks.")
    places = [folder, *sorted(place for place in folder.iterdir() if place.is_dir())]
    tasks = [task for place in places if (task := _task(place, split)) is not None]
    if not tasks:
        raise ValueError(
            f"{folder}: neither it nor a subfolder holds a task. Expected are queries.jsonl, corpus.jsonl and "
            f"{_QRELS}, or {split}.jsonl (all may end in .jsonl.gz)."
        )
    return tasks


def _task(folder: Path, split: str) -> AbsTask | None:
    """The task whose files a folder holds, its data still to be loaded; ``None`` if there is none."""
    parts = {name: _find(folder, name) for name in _RETRIEVAL_FILES}
    found = [path for path in parts.values() if path is not None]
    if found or (folder / _QRELS).is_file():
        files = [*found, folder / _QRELS]
        if len(found) < len(parts) or not (folder / _QRELS).is_file():
            names = ", ".join(path.name for path in files if path.is_file())
            raise ValueError(
                f"{folder}: a retrieval task needs queries.jsonl, corpus.jsonl and {_QRELS}; found {names}."
            )
        if split != TEST_SPLIT:
            return None
        queries, corpus = found
        kind = LocalAdvBenchIR if is_advbench(folder.name) else LocalRetrieval
        return kind(folder, files, split, lambda: _retrieval(queries, corpus, folder / _QRELS))
    stems = _DEV_SPLITS if split in _DEV_SPLITS else (split,)
    rows_file = next((path for stem in stems if (path := _find(folder, stem)) is not None), None)
    if rows_file is None:
        return None
    train = _find(folder, "train")
    first = next(read_jsonl(rows_file), None)
    if first is None:
        raise ValueError(f"{rows_file}: the file has no rows.")
    columns = set(first)
    if {"sentence1", "sentence2", "score"} <= columns:
        return LocalSTS(folder, [rows_file], split, lambda: _sts(rows_file))
    if {"sentence1", "sentence2", "label"} <= columns:
        return LocalPairClassification(folder, [rows_file], split, lambda: _pairs(rows_file))
    if {"query", "positive", "negative"} <= columns:
        return LocalReranking(folder, [rows_file], split, lambda: _reranking(rows_file))
    if {"text", "label"} <= columns and train is not None:
        return LocalClassification(folder, [rows_file, train], split, lambda: _labelled(rows_file, train))
    if {"text", "label"} <= columns:
        return LocalClustering(folder, [rows_file], split, lambda: _labelled(rows_file, None))
    raise ValueError(
        f"{rows_file}: its columns {sorted(columns)} are those of no task. Expected are sentence1, sentence2 and score "
        "or label; query, positive and negative; or text and label."
    )


class _Local:
    """What tasks from files share: metadata of their own, and data that are read when needed.

    Args:
        folder: The folder; its name is the task's.
        files: The files that are read.
        split: Name of the split.
        read: Reads them.
    """

    kind: str
    main_score: str

    def __init__(self, folder: Path, files: Sequence[Path], split: str, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self.data_loaded = False
        self.dataset: Any = None
        self.metadata = TaskMetadata.model_validate(
            {
                "name": self.name_of(folder),
                "description": f"The {self.kind} task in a folder of JSON lines.",
                # The revision tells data apart, wherever the folder lies.
                "dataset": {"path": folder.resolve().name, "revision": _digest(files)},
                "type": self.kind,
                "category": "t2t",
                "eval_splits": [split],
                "eval_langs": ["eng-Latn"],
                "main_score": self.main_score,
            }
        )
        super().__init__()

    @staticmethod
    def name_of(folder: Path) -> str:
        """The task's name."""
        return folder.resolve().name

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        """Read the files."""
        if not self.data_loaded:
            self.dataset = self._shaped(self._read(), self.metadata.eval_splits[0])
            self.data_loaded = True

    def unload_data(self) -> None:
        """Forget the data; mteb's own would forget the metadata too."""
        self.dataset, self.data_loaded = None, False

    def _shaped(self, parts: dict[str, Any], split: str) -> Any:
        """Data in mteb's shape: rows by split."""
        return DatasetDict(
            {split if name == TEST_SPLIT else name: Dataset.from_list(rows) for name, rows in parts.items()}
        )


class LocalSTS(_Local, AbsTaskSTS):
    """Spearman correlation of cosine similarities with gold scores."""

    kind, main_score = "STS", "cosine_spearman"


class LocalPairClassification(_Local, AbsTaskPairClassification):
    """Average precision of similarities, best over the similarity functions."""

    kind, main_score = "PairClassification", "max_ap"


class LocalClassification(_Local, AbsTaskClassification):
    """Accuracy of logistic regression on 8 examples a class, mean over 10 draws."""

    kind, main_score = "Classification", "accuracy"


class LocalClustering(_Local, AbsTaskClustering):
    """V-measure of k-means, mean over 10 draws; of a large set 2,048 texts are drawn, always the same."""

    kind, main_score = "Clustering", "v_measure"
    input_column_name, label_column_name = "text", "label"
    max_fraction_of_documents_to_embed = None
    max_document_to_embed = 2048
    max_documents_per_cluster = 2048


class LocalRetrieval(_Local, AbsTaskRetrieval):
    """nDCG@10 of a search over the corpus."""

    kind, main_score = "Retrieval", "ndcg_at_10"

    def _shaped(self, parts: dict[str, Any], split: str) -> Any:
        tables = {name: Dataset.from_list(parts[name]) for name in _RETRIEVAL_FILES}
        relevant = {"relevant_docs": parts["relevant_docs"], "top_ranked": parts.get("top_ranked")}
        return {"default": {split: {**tables, **relevant}}}


class LocalReranking(LocalRetrieval):
    """Mean average precision over each query's own candidates."""

    kind, main_score = "Reranking", "map_at_1000"


class LocalAdvBenchIR(LocalRetrieval):
    """AdvBench-IR from files; see :class:`~llm2vec_gen_st.evaluation.advbench.AdvBenchIR`."""

    main_score = AdvBenchIR.metadata.main_score

    @staticmethod
    def name_of(folder: Path) -> str:
        """The task's name, however the folder's is spelled."""
        return AdvBenchIR.metadata.name


def _find(folder: Path, name: str) -> Path | None:
    return next((path for end in (".jsonl", ".jsonl.gz") if (path := folder / f"{name}{end}").is_file()), None)


def _digest(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(path.name.encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _checked(path: Path, kinds: Mapping[str, type | tuple[type, ...]]) -> Rows:
    """Rows of a file, with the wanted columns and no others."""
    rows: Rows = []
    for number, row in enumerate(read_jsonl(path), 1):
        for column, kind in kinds.items():
            if column not in row or not isinstance(row[column], kind) or isinstance(row[column], bool):
                found = f"found {type(row[column]).__name__}" if column in row else "it is missing"
                raise ValueError(f"{path}, row {number}: the column {column!r} should be {_named(kind)}, but {found}.")
        rows.append({column: _writable(row[column]) for column in kinds})
    if not rows:
        raise ValueError(f"{path}: the file has no rows.")
    return rows


def _writable(value: Any) -> Any:
    """The value, with texts that tables can hold; models read a lone surrogate as this too."""
    if isinstance(value, list):
        return [_writable(item) for item in value]
    return without_lone_surrogates(value) if isinstance(value, str) else value


def _named(kind: type | tuple[type, ...]) -> str:
    names = {str: "text", int: "a whole number", float: "a number", list: "a list"}
    return " or ".join(names[each] for each in (kind if isinstance(kind, tuple) else (kind,)))


def _sts(path: Path) -> dict[str, Any]:
    rows = _checked(path, {"sentence1": str, "sentence2": str, "score": (int, float)})
    for number, row in enumerate(rows, 1):
        row["score"] = float(row["score"])
        if not math.isfinite(row["score"]):
            raise ValueError(f"{path}, row {number}: the score {row['score']} is not finite.")
    return {TEST_SPLIT: rows}


def _pairs(path: Path) -> dict[str, Any]:
    rows = _checked(path, {"sentence1": str, "sentence2": str, "label": int})
    for number, row in enumerate(rows, 1):
        row["labels"] = row.pop("label")
        if row["labels"] not in (0, 1):
            raise ValueError(f"{path}, row {number}: the label of a pair is 0 or 1, found {row['labels']}.")
    return {TEST_SPLIT: rows}


def _labelled(path: Path, train: Path | None) -> dict[str, Any]:
    parts = {
        name: _checked(file, {"text": str, "label": (int, str)})
        for name, file in (("test", path), ("train", train))
        if file
    }
    # Numbers in the order of their names, the same in all splits.
    names = sorted({str(row["label"]) for rows in parts.values() for row in rows})
    numbers = {name: number for number, name in enumerate(names)}
    return {
        part: [{"text": row["text"], "label": numbers[str(row["label"])]} for row in rows]
        for part, rows in parts.items()
    }


def _reranking(path: Path) -> dict[str, Any]:
    queries, corpus = [], []
    relevant: dict[str, dict[str, int]] = {}
    candidates: dict[str, list[str]] = {}
    for number, row in enumerate(_checked(path, {"query": str, "positive": list, "negative": list})):
        texts = [(text, grade) for grade, key in ((1, "positive"), (0, "negative")) for text in row[key]]
        if not row["positive"] or not all(isinstance(text, str) for text, _ in texts):
            raise ValueError(f"{path}, row {number + 1}: positive and negative are lists of texts, positive not empty.")
        query = f"q{number}"
        # Shuffled by their text, so that no order of ids can break ties in favour of the positives.
        ids = [
            f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{query}-{place}" for place, (text, _) in enumerate(texts)
        ]
        queries.append({"id": query, "text": row["query"]})
        corpus += [{"id": key, "text": text} for key, (text, _) in zip(ids, texts, strict=True)]
        relevant[query] = {key: grade for key, (_, grade) in zip(ids, texts, strict=True)}
        candidates[query] = ids
    return {"queries": queries, "corpus": corpus, "relevant_docs": relevant, "top_ranked": candidates}


def _retrieval(queries: Path, corpus: Path, qrels: Path) -> dict[str, Any]:
    asked = _by_id(queries, {"_id": str, "text": str})
    documents = _by_id(corpus, {"_id": str, "text": str})
    titles = _titles(corpus)
    relevant: dict[str, dict[str, int]] = {}
    # Not splitlines: ids may hold characters that it takes for the end of a line.
    for number, line in enumerate(qrels.read_text(encoding="utf-8").removesuffix("\n").split("\n"), 1):
        fields = line.removesuffix("\r").split("\t")
        if number == 1:
            if fields != _QRELS_COLUMNS:
                raise ValueError(f"{qrels}, line 1: expected the header {' '.join(_QRELS_COLUMNS)}, tab-separated.")
            continue
        if len(fields) != 3 or not fields[2].strip().isdigit():
            raise ValueError(f"{qrels}, line {number}: expected a query's id, a document's id and a whole number.")
        query, document, grade = fields
        if query not in asked or document not in documents:
            missing, file = (query, queries) if query not in asked else (document, corpus)
            raise ValueError(f"{qrels}, line {number}: the id {missing!r} is not in {file.name}.")
        relevant.setdefault(query, {})[document] = int(grade)
    if not relevant:
        raise ValueError(f"{qrels}: no query has a relevant document.")
    return {
        "queries": [{"id": key, "text": text} for key, text in asked.items() if key in relevant],
        "corpus": [{"id": key, "title": titles[key], "text": text} for key, text in documents.items()],
        "relevant_docs": relevant,
    }


def _titles(corpus: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, row in enumerate(read_jsonl(corpus), 1):
        title = row.get("title")
        if not isinstance(title, str | None):
            raise ValueError(f"{corpus}, row {number}: the title should be text, but found {type(title).__name__}.")
        found[_writable(row["_id"])] = _writable(title or "")
    return found


def _by_id(path: Path, kinds: Mapping[str, type]) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, row in enumerate(_checked(path, kinds), 1):
        if row["_id"] in found:
            raise ValueError(f"{path}, row {number}: the id {row['_id']!r} has occurred before.")
        found[row["_id"]] = row["text"]
    return found
