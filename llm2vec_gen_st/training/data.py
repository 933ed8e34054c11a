"""Training rows: columns taken by name, labels from a teacher, and which text each row shows the student."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import read_rows, with_all_columns
from llm2vec_gen_st.responses.store import MANIFEST, read_responses
from llm2vec_gen_st.training.recipes import Recipe

if TYPE_CHECKING:
    from datasets import Dataset

REQUIRED = ("query", "response")
LABEL = "label"
NEGATIVE_QUERY = "negative_query"
NEGATIVE_RESPONSE = "negative_response"
NEGATIVE_LABEL = "negative_label"
NEGATIVES = (NEGATIVE_QUERY, NEGATIVE_RESPONSE, NEGATIVE_LABEL)
KNOWN = (*REQUIRED, LABEL, *NEGATIVES, "id", "flag", "response_tokens")
DOCUMENT_SOURCES = ("response", "query")


def load_rows(data: str | Path | Dataset, recipe: Recipe, *, partial: bool = False) -> Dataset:
    """Read and check training data, before any model is loaded.

    Args:
        data: A folder of :func:`~llm2vec_gen_st.responses.write_responses`, a ``.jsonl`` or ``.parquet`` file, or a
            ``datasets.Dataset``; columns ``query`` and ``response``, optionally ``label`` (the teacher's vector),
            ``id`` and ``flag`` (``ok``, or ``empty`` for an empty response, where there is none); for the
            margin loss ``negative_query`` (null or empty where a row has none), and
            optionally ``negative_response``, or ``negative_label`` beside ``label``.
        recipe: Decides which flags are used, and whether hard negatives are.
        partial: Whether a folder whose responses are not all written yet is accepted.

    Returns:
        The rows, those with unwanted flags left out.

    Raises:
        ValueError: If a column is missing or unknown, or no row is left; names it. If a query or response is not text,
            or a negative query has no response where others have one; names the row.
    """
    datasets = require("datasets", extra="train", why="training")
    if isinstance(data, str | Path):
        path = Path(data)
        if path.is_dir():
            if not (path / MANIFEST).exists():
                raise ValueError(
                    f"{path} holds no {MANIFEST}; write responses into it with `llm2vec-gen respond` first."
                )
            rows = read_responses(path, include=recipe.include, partial=partial)
        else:
            listed = with_all_columns(read_rows(path))
            for column in REQUIRED:
                _check_texts(column, [row[column] for row in listed if column in row])
            rows = datasets.Dataset.from_list(listed)
    else:
        rows = data
    missing = [column for column in REQUIRED if column not in rows.column_names]
    unknown = [column for column in rows.column_names if column not in KNOWN]
    if missing or unknown:
        raise ValueError(
            f"Training data needs the columns {list(REQUIRED)} and may have {list(KNOWN[2:])}; "
            f"missing: {missing or 'none'}, unknown: {unknown or 'none'}."
        )
    flags = _flags(rows)
    kept = rows.remove_columns("flag") if "flag" in rows.column_names else rows
    wanted = set(recipe.include)
    rows = kept.add_column("flag", flags).select([row for row, flag in enumerate(flags) if flag in wanted])
    rows = _checked_negatives(rows, recipe)
    if not len(rows):
        raise ValueError(f"No training rows are left after keeping the flags {list(recipe.include)}.")
    return rows


def _flags(rows: Dataset) -> list[str]:
    """How each response ended: as its row says, or else whether there is one."""
    for column in REQUIRED:
        _check_texts(column, list(rows[column]))
    said = list(rows["flag"]) if "flag" in rows.column_names else [None] * len(rows)
    return [flag or ("ok" if response else "empty") for flag, response in zip(said, rows["response"], strict=True)]


def _check_texts(column: str, values: Sequence[Any]) -> None:
    for number, value in enumerate(values):
        if not isinstance(value, str):
            found = "null" if value is None else type(value).__name__
            raise ValueError(f"Row {number}: the column {column!r} should be text, but found {found}.")


def _checked_negatives(rows: Dataset, recipe: Recipe) -> Dataset:
    """The rows with the columns of hard negatives that this recipe uses, and no others."""
    present = [column for column in NEGATIVES if column in rows.column_names]
    if not recipe.margin_weight:
        return rows.remove_columns(present)
    if NEGATIVE_QUERY not in present:
        raise ValueError(f"margin_weight {recipe.margin_weight} needs hard negatives: a column {NEGATIVE_QUERY!r}.")
    if LABEL in rows.column_names:
        if NEGATIVE_RESPONSE in present and NEGATIVE_LABEL not in present:
            raise ValueError(
                f"Rows whose {LABEL!r} is given need {NEGATIVE_LABEL!r} too, the teacher's embedding of each "
                f"{NEGATIVE_RESPONSE!r}; or leave that column out."
            )
    elif NEGATIVE_LABEL in present:
        raise ValueError(f"The column {NEGATIVE_LABEL!r} is of use beside a column {LABEL!r} only.")
    queries = rows[NEGATIVE_QUERY]
    for column in present[1:]:
        for number, (query, value) in enumerate(zip(queries, rows[column], strict=True)):
            if query and value is None:
                raise ValueError(f"Row {number} has a {NEGATIVE_QUERY!r} but no {column!r}, which other rows have.")
    return rows


def split_held_out(rows: Dataset, recipe: Recipe) -> tuple[Dataset, Dataset]:
    """Shuffle by the recipe's seed and keep some queries out of training, at most a fifth of them.

    Args:
        rows: All rows.
        recipe: ``held_out`` and ``seed``.

    Returns:
        Training rows and held-out rows.
    """
    count = min(recipe.held_out, len(rows) // 5)
    order = np.random.default_rng(recipe.seed).permutation(len(rows))
    return rows.select(sorted(order[count:])), rows.select(sorted(order[:count]))


def prepare_labels(labels: np.ndarray, recipe: Recipe, mean: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Centre and scale teacher embeddings as the recipe says.

    Args:
        labels: (N, D).
        recipe: ``center_labels`` and ``normalize_labels``.
        mean: (D), the mean to subtract; taken from ``labels`` if not given.

    Returns:
        The labels (N, D) and the mean (D) that was subtracted.
    """
    mean = (
        (labels.mean(axis=0) if recipe.center_labels else np.zeros(labels.shape[1], np.float32))
        if mean is None
        else mean
    )
    labels = labels - mean
    if recipe.normalize_labels:
        labels = labels / np.maximum(np.linalg.norm(labels, axis=1, keepdims=True), 1e-12)
    return labels.astype(np.float32), mean


def student_rows(rows: Dataset, recipe: Recipe) -> Dataset:
    """What the student reads, and the text that it is to produce.

    Args:
        rows: Training rows.
        recipe: Instructions, and which texts serve as documents too.

    Returns:
        Dataset with ``query`` (instruction included), ``response`` (the target text), ``flag``, and ``label`` if
        the rows have it. If the rows have hard negatives, queries keep theirs, behind the query's own instruction;
        documents have none (an empty text).

    Raises:
        ValueError: If a source of documents is not known, or needs a teacher where labels are given ready-made.
    """
    unknown = sorted(set(recipe.document_sources) - set(DOCUMENT_SOURCES))
    if unknown:
        raise ValueError(f"Unknown document_sources {unknown}; known are {', '.join(DOCUMENT_SOURCES)}.")
    labelled = LABEL in rows.column_names
    unlabelled = [source for source in recipe.document_sources if source != "response"]
    if labelled and unlabelled:
        raise ValueError(
            f"document_sources {unlabelled} need a teacher for these texts; a column 'label' has only responses."
        )
    inputs = with_prompts(rows["query"], recipe.query_prompts)
    targets, flags, index = list(rows["response"]), list(rows["flag"]), list(range(len(rows)))
    for source in recipe.document_sources:
        documents = _documents(rows, source)
        inputs += [recipe.document_prompt + text for _, text, _ in documents]
        targets += [text for _, text, _ in documents]
        flags += [flag for _, _, flag in documents]
        index += [row for row, _, _ in documents]
    columns: dict[str, list[Any]] = {"query": inputs, "response": targets, "flag": flags}
    if labelled:
        labels = rows[LABEL]
        columns[LABEL] = [labels[row] for row in index]
    # The host reads all columns for its statistics, and takes no nulls.
    absent: dict[str, Any] = {NEGATIVE_QUERY: "", NEGATIVE_RESPONSE: ""}
    for column in NEGATIVES:
        if column in rows.column_names:
            values = list(rows[column])
            if column == NEGATIVE_LABEL:
                absent[column] = [0.0] * max((len(value) for value in values if value is not None), default=0)
            values = [absent[column] if value is None else value for value in values]
            if column == NEGATIVE_QUERY:
                prompted = with_prompts(values, recipe.query_prompts)
                values = [text if value else "" for text, value in zip(prompted, values, strict=True)]
            columns[column] = values + [absent[column]] * (len(inputs) - len(values))
    datasets = require("datasets", extra="train", why="training")
    built: Dataset = datasets.Dataset.from_dict(columns)
    return built


def _documents(rows: Dataset, source: str) -> list[tuple[int, str, str]]:
    """Row, text and flag of each document that a source gives."""
    if source == "query":
        return [(row, text, "ok") for row, text in enumerate(rows["query"])]
    return list(zip(range(len(rows)), rows["response"], rows["flag"], strict=True))


def with_prompts(queries: Sequence[str], prompts: Sequence[str]) -> list[str]:
    """Put instructions before queries, taking them in turn.

    Example:
        >>> with_prompts(["a", "b", "c"], ["", "Answer: "])
        ['a', 'Answer: b', 'c']
    """
    return [prompts[row % len(prompts)] + query for row, query in enumerate(queries)]
