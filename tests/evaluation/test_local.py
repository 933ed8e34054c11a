"""Folders as tasks: the kind is told from the files, scores are right, and bad files are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.evaluation import evaluate
from llm2vec_gen_st.evaluation.local import local_tasks

KINDS = {
    "classification": "Classification",
    "clustering": "Clustering",
    "pairs": "PairClassification",
    "reranking": "Reranking",
    "retrieval": "Retrieval",
    "sts": "STS",
}


def test_the_kind_of_a_task_is_told_from_its_files(folder: Path) -> None:
    assert {task.metadata.name: task.metadata.type for task in local_tasks(folder)} == KINDS


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_may_be_a_task_itself(folder: Path, name: str) -> None:
    (task,) = local_tasks(folder / name)
    assert task.metadata.name == name


def test_scores_are_those_worked_out_by_hand(folder: Path, words: SentenceTransformer, tmp_path: Path) -> None:
    scores = {result.task_name: result.score for result in evaluate(words, str(folder), tmp_path, progress=False)}
    assert scores["sts"] == pytest.approx(1.0)  # the more words in common, the higher the gold score
    assert scores["pairs"] == pytest.approx(1.0)
    assert scores["retrieval"] == pytest.approx(1.0)  # only the title names the animal, so titles are read
    assert scores["reranking"] == pytest.approx(1.0)
    assert scores["classification"] > 0.9


def test_candidates_that_look_alike_are_not_ranked_by_their_label(
    files: Any, tmp_path: Path, words: SentenceTransformer
) -> None:
    rows = [
        {"query": "owl", "positive": [f"same {row}"], "negative": [f"as {row} {i}" for i in range(9)]}
        for row in range(30)
    ]
    files.jsonl(tmp_path / "ties" / "test.jsonl", rows)
    (result,) = evaluate(words, str(tmp_path / "ties"), tmp_path / "out", progress=False)
    assert 0.15 < result.score < 0.5  # by chance 0.29


def test_a_dev_split_is_read_where_there_is_one(folder: Path) -> None:
    shutil.copy(folder / "sts" / "test.jsonl", folder / "sts" / "dev.jsonl")
    shutil.copy(folder / "pairs" / "test.jsonl", folder / "pairs" / "validation.jsonl")
    tasks = local_tasks(folder, split="dev")
    assert {task.metadata.name: list(task.eval_splits) for task in tasks} == {"pairs": ["dev"], "sts": ["dev"]}
    for task in tasks:
        task.load_data()
        assert task.dataset is not None
        assert list(task.dataset) == ["dev"]


def test_a_task_can_be_loaded_again_after_its_data_were_dropped(folder: Path) -> None:
    (task,) = local_tasks(folder / "sts")
    task.load_data()
    task.unload_data()
    task.load_data()
    assert task.metadata.name == "sts"
    assert task.dataset is not None
    assert len(task.dataset["test"]) == 4


def test_the_revision_follows_the_data_and_not_their_place(folder: Path, tmp_path: Path) -> None:
    def revision(place: Path) -> str:
        return str(local_tasks(place)[0].metadata.dataset["revision"])

    before = revision(folder / "sts")
    shutil.copytree(folder / "sts", tmp_path / "sts")
    assert revision(tmp_path / "sts") == before
    with open(tmp_path / "sts" / "test.jsonl", "a") as handle:
        handle.write('{"sentence1": "a", "sentence2": "b", "score": 1}\n')
    assert revision(tmp_path / "sts") != before


@given(labels=st.lists(st.one_of(st.integers(-3, 3), st.sampled_from(["a", "b"])), min_size=2, max_size=12))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equal_labels_and_only_those_get_equal_numbers(files: Any, tmp_path: Path, labels: list[int | str]) -> None:
    files.jsonl(tmp_path / "set" / "test.jsonl", ({"text": "a", "label": label} for label in labels))
    (task,) = local_tasks(tmp_path / "set")
    task.load_data()
    assert task.dataset is not None
    numbers = task.dataset["test"]["label"]
    assert min(numbers) >= 0  # mteb leaves out what is labelled -1
    for one, first in zip(labels, numbers, strict=True):
        assert [number == first for number in numbers] == [other == one for other in labels]


IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"), min_size=1, max_size=6)


@given(ids=st.lists(IDS, min_size=2, max_size=5, unique=True))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_of_any_characters_are_kept(files: Any, tmp_path: Path, ids: list[str]) -> None:
    place = tmp_path / "set"
    files.jsonl(place / "queries.jsonl", ({"_id": key, "text": "a"} for key in ids))
    files.jsonl(place / "corpus.jsonl", ({"_id": key, "text": "b"} for key in ids))
    files.qrels(place / "qrels.tsv", ((key, key, 2) for key in ids))
    (task,) = local_tasks(place)
    task.load_data()
    assert task.dataset is not None
    data = task.dataset["default"]["test"]
    assert list(data["queries"]["id"]) == list(data["corpus"]["id"]) == ids
    assert data["relevant_docs"] == {key: {key: 2} for key in ids}


def test_texts_with_half_a_character_are_scored(files: Any, tmp_path: Path, words: SentenceTransformer) -> None:
    pairs = [("owl", "owl", 2), ("owl fox", "owl \ud800", 1), ("bee", "fox", 0)]
    files.jsonl(tmp_path / "sts" / "test.jsonl", ({"sentence1": a, "sentence2": b, "score": c} for a, b, c in pairs))
    rank = {"query": "owl \ud800", "positive": ["owl"], "negative": ["fox \udfff"]}
    files.jsonl(tmp_path / "rank" / "test.jsonl", [rank])
    scores = evaluate(words, str(tmp_path), tmp_path / "out", progress=False)
    assert [result.score for result in scores] == [1, 1]


def unknown_id(files: Any, place: Path) -> None:
    files.retrieval(place)
    files.qrels(place / "qrels.tsv", [("q0", "d99", 1)])


def repeated_id(files: Any, place: Path) -> None:
    files.retrieval(place)
    files.jsonl(place / "queries.jsonl", [{"_id": "q0", "text": "a"}, {"_id": "q0", "text": "b"}])


def wrong_header(files: Any, place: Path) -> None:
    files.retrieval(place)
    (place / "qrels.tsv").write_text("q0\td0\t1\n")


def wrong_grade(files: Any, place: Path) -> None:
    files.retrieval(place)
    files.qrels(place / "qrels.tsv", [("q0", "d0", 1), ("q1", "d1", "high")])


def no_qrels(files: Any, place: Path) -> None:
    files.retrieval(place)
    (place / "qrels.tsv").unlink()


def missing_column(files: Any, place: Path) -> None:
    files.sts(place)
    with open(place / "test.jsonl", "a") as handle:
        handle.write('{"sentence1": "a", "score": 1}\n')


def wrong_kind(files: Any, place: Path) -> None:
    files.jsonl(place / "test.jsonl", [{"sentence1": "a", "sentence2": "b", "score": "high"}])


def score_not_finite(files: Any, place: Path) -> None:
    files.jsonl(place / "test.jsonl", [{"sentence1": "a", "sentence2": "b", "score": float("nan")}])


def wrong_title(files: Any, place: Path) -> None:
    files.retrieval(place)
    files.jsonl(
        place / "corpus.jsonl", [{"_id": "d0", "text": "a", "title": "t"}, {"_id": "d1", "text": "b", "title": 3}]
    )


def wrong_label(files: Any, place: Path) -> None:
    files.jsonl(place / "test.jsonl", [{"sentence1": "a", "sentence2": "b", "label": 2}])


def no_positive(files: Any, place: Path) -> None:
    files.jsonl(place / "test.jsonl", [{"query": "a", "positive": [], "negative": ["b"]}])


def unknown_columns(files: Any, place: Path) -> None:
    files.jsonl(place / "test.jsonl", [{"premise": "a", "hypothesis": "b"}])


def empty_file(files: Any, place: Path) -> None:
    files.jsonl(place / "test.jsonl", [])


def no_files(files: Any, place: Path) -> None:
    place.mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (unknown_id, r"qrels.tsv, line 2: the id 'd99' is not in corpus.jsonl"),
        (repeated_id, r"queries.jsonl, row 2: the id 'q0' has occurred before"),
        (wrong_header, r"qrels.tsv, line 1: expected the header"),
        (wrong_grade, r"qrels.tsv, line 3"),
        (no_qrels, r"needs queries.jsonl, corpus.jsonl and qrels.tsv"),
        (missing_column, r"test.jsonl, row 5: the column 'sentence2' .* missing"),
        (wrong_kind, r"row 1: the column 'score' should be a whole number or a number, but found str"),
        (score_not_finite, r"test.jsonl, row 1: the score nan is not finite"),
        (wrong_title, r"corpus.jsonl, row 2: the title should be text, but found int"),
        (wrong_label, r"row 1: the label of a pair is 0 or 1, found 2"),
        (no_positive, r"row 1: positive and negative"),
        (unknown_columns, r"\['hypothesis', 'premise'\] are those of no task"),
        (empty_file, r"test.jsonl: the file has no rows"),
        (no_files, r"neither it nor a subfolder holds a task"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(
    files: Any, tmp_path: Path, spoil: Callable[[Any, Path], None], said: str
) -> None:
    place = tmp_path / "set"
    spoil(files, place)
    with pytest.raises(ValueError, match=said) as caught:
        local_tasks(place)[0].load_data()
    assert str(place) in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        local_tasks(tmp_path / "nowhere")
