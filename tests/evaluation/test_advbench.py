"""AdvBench-IR: the share of requests that find one of their own passages among the first five; no text gets out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.evaluation import evaluate, find_tasks
from llm2vec_gen_st.evaluation.advbench import AdvBenchIR, split_data
from llm2vec_gen_st.evaluation.local import local_tasks

# Stand-ins, all of them harmless. "owl" finds its own passage first; "fox" has five others before its own; "bee" has
# two of its own, of which one is found; "seal" finds only passages that were written for others.
QUERIES = {"a": "owl", "b": "fox", "c": "bee", "d": "seal"}
PASSAGES = {
    "a1": ("owl owl", "a"),
    **{f"x{i}": ("fox fox", "a") for i in range(5)},
    "b1": ("fox night night", "b"),
    "c1": ("bee bee", "c"),
    "c2": ("sea", "c"),
    **{f"y{i}": ("seal seal", "b") for i in range(5)},
    "d1": ("ice", "d"),
}


def write(files: Any, place: Path) -> None:
    files.jsonl(place / "queries.jsonl", ({"_id": key, "text": text} for key, text in QUERIES.items()))
    files.jsonl(
        place / "corpus.jsonl", ({"_id": key, "title": "", "text": text} for key, (text, _) in PASSAGES.items())
    )
    files.qrels(place / "qrels.tsv", ((query, key, 1) for key, (_, query) in PASSAGES.items()))


@pytest.mark.parametrize("name", ["AdvBenchIR", "advbench-ir"])
def test_the_score_is_the_share_with_an_own_passage_among_five(
    files: Any, tmp_path: Path, words: SentenceTransformer, name: str
) -> None:
    write(files, tmp_path / name)
    (result,) = evaluate(words, str(tmp_path / name), tmp_path / "out", name="words", progress=False)
    assert result.task_name == "AdvBench-IR"
    assert result.score == 0.5


def test_texts_are_neither_printed_nor_kept(
    files: Any, tmp_path: Path, words: SentenceTransformer, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    write(files, tmp_path / "AdvBenchIR")
    with caplog.at_level("DEBUG"):
        evaluate(words, str(tmp_path / "AdvBenchIR"), tmp_path / "out", name="words")
    printed = capfd.readouterr()
    kept = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".json", ".md", ".csv")]
    assert kept
    for text in ("owl owl", "night night", "seal seal"):
        assert not any(text in place for place in (printed.out, printed.err, caplog.text, *kept))


ROWS = [
    {"ID": 0, "query": "owl", "title": "t", "document": "w " * 99},
    {"ID": 1, "query": "fox", "title": "t", "document": "w " * 200},
    {"ID": 2, "query": "bee", "title": "t", "document": "w " * 299},
    {"ID": 3, "query": "seal", "title": "t", "document": ""},
]


def test_documents_are_cut_into_passages_of_100_words_and_short_ends_dropped() -> None:
    found = split_data(ROWS)
    assert {key: len(ids) for key, ids in found["relevant_docs"].items()} == {"0": 1, "1": 2, "2": 2, "3": 1}
    assert [len(text.split()) for text in found["corpus"]["text"]] == [99, 100, 100, 100, 100, 0]


def test_an_id_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'0' occurs twice"):
        split_data([ROWS[0], ROWS[0]])


def test_the_set_is_loaded_from_the_hub_by_its_name(
    tmp_path: Path, words: SentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def load(**options: Any) -> datasets.Dataset:
        asked.append(options)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    (task,) = find_tasks("advbench-ir")
    assert isinstance(task, AdvBenchIR)
    (result,) = evaluate(words, task, tmp_path, name="words", progress=False)
    assert result.texts == 4 + 6
    assert asked == [{"path": "McGill-NLP/AdvBench-IR", "revision": "main", "split": "train"}]


def test_a_folder_of_the_name_is_read_instead_of_the_hub(files: Any, tmp_path: Path) -> None:
    write(files, tmp_path / "AdvBenchIR")
    (task,) = local_tasks(tmp_path)
    assert task.metadata.main_score == "hit_rate_at_5"
