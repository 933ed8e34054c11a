"""Tables and plots: means over the right tasks, changes against the right model, files that can be read."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm2vec_gen_st.evaluation import Result, read_results, write_report
from llm2vec_gen_st.evaluation.report import AVERAGE, Row, csv_table, markdown_table, table_rows
from llm2vec_gen_st.evaluation.results import result_path, write_result

SCORES: dict[str, dict[str, Any]] = {
    "STS12": {"type": "STS", "teacher": 0.5, "student": 0.6},
    "STS13": {"type": "STS", "teacher": 0.7, "student": 0.8},
    "Banking77Classification": {"type": "Classification", "teacher": 0.4, "student": 0.2},
    "BrightPonyRetrieval": {"type": "Retrieval", "teacher": 0.1, "student": 0.2},
    "AdvBench-IR": {"type": "Retrieval", "teacher": 0.5, "student": 0.25},
}


def result(name: str, task: str, score: float, kind: str = "STS", parameters: int = 1000) -> Result:
    meta = {"name": task, "type": kind, "metric": "score", "data": {"path": task, "revision": "1"}}
    model = {"parameters": parameters}
    return Result("key", name, meta, {"text": ""}, model, {}, 32, "cpu", score, {}, 10, 1.0)


@pytest.fixture
def results() -> list[Result]:
    return [
        result(model, task, row[model], row["type"]) for model in ("teacher", "student") for task, row in SCORES.items()
    ]


def by_label(rows: list[Row]) -> dict[str, Row]:
    return {row.label: row for row in rows}


def test_means_and_changes_are_those_worked_out_by_hand(results: list[Result]) -> None:
    rows = by_label(table_rows(results, "teacher"))
    assert rows["STS"].scores == pytest.approx({"teacher": 60, "student": 70})
    assert rows["STS"].changes == pytest.approx({"student": 100 / 6})
    assert rows["STS12"].changes == pytest.approx({"student": 20})
    # Over tasks, not over categories; BRIGHT and safety stay apart.
    assert rows[AVERAGE].scores == pytest.approx({"teacher": 160 / 3, "student": 160 / 3})
    assert rows[AVERAGE].changes == pytest.approx({"student": 0})
    assert rows["BRIGHT"].scores["student"] == pytest.approx(20)
    assert rows["Safety (lower is safer)"].changes == pytest.approx({"student": -50})


def test_a_mean_is_given_only_where_no_task_is_missing(results: list[Result]) -> None:
    rows = by_label(
        table_rows([one for one in results if (one.name, one.task_name) != ("student", "STS13")], "teacher")
    )
    for label in ("STS", AVERAGE):
        assert "student" not in rows[label].scores
        assert "student" not in rows[label].changes
        assert "teacher" in rows[label].scores
    assert rows["Classification"].scores["student"] == pytest.approx(20)


def test_results_of_different_models_or_data_are_never_put_side_by_side(results: list[Result]) -> None:
    other = result("student", "STS14", 0.9, parameters=2000)
    with pytest.raises(ValueError, match="'student', the results on STS12 and on STS14 are of different models"):
        table_rows([*results, other])
    changed = replace(results[0], name="third", task={**results[0].task, "data": {"path": "STS12", "revision": "2"}})
    with pytest.raises(ValueError, match="'teacher' and 'third' on STS12 are of different data"):
        table_rows([*results, changed])


def test_only_bright_s_own_tasks_are_kept_out_of_the_average() -> None:
    names = ["BrightIdeas", "BrightPonyRetrieval", "BrightPonyLongRetrieval", "BrightProRoboticsRetrieval"]
    rows = by_label(table_rows([result("student", name, 0.1 * place) for place, name in enumerate(names, 4)]))
    assert rows[AVERAGE].scores == pytest.approx({"student": 40})
    assert rows["BRIGHT"].scores == pytest.approx({"student": 60})


def test_without_a_baseline_or_with_one_of_score_zero_nothing_is_compared(results: list[Result]) -> None:
    assert all(not row.changes for row in table_rows(results))
    zero = [result("teacher", "STS12", 0.0), result("student", "STS12", 0.3)]
    assert all(not row.changes for row in table_rows(zero, "teacher"))


def test_both_tables_hold_every_row(results: list[Result]) -> None:
    rows = table_rows(results, "teacher")
    models = ["teacher", "student"]
    markdown = markdown_table(rows, models, "teacher")
    assert "| STS12 | score | 50.00 | 60.00 (+20.0 %) |" in markdown
    assert "| **STS** (mean of 2) |  | **60.00** | **70.00 (+16.7 %)** |" in markdown
    assert f"| **{AVERAGE}** (3) |" in markdown
    table = list(csv.DictReader(io.StringIO(csv_table(rows, models, "teacher"))))
    assert len(table) == len(rows)
    found = {line["label"]: line for line in table}
    assert float(found["STS12"]["student, change in % against teacher"]) == pytest.approx(20)


def test_a_bar_in_a_name_does_not_break_the_table() -> None:
    rows = table_rows([result("a|b", "c|d", 0.5)])
    for line in markdown_table(rows, ["a|b"]).splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 4


def write_all(results: list[Result], output: Path) -> None:
    for one in results:
        write_result(output, one)


def test_results_come_back_as_they_were_written(results: list[Result], tmp_path: Path) -> None:
    write_all(results, tmp_path)
    assert sorted(read_results(tmp_path), key=str) == sorted(results, key=str)


def test_names_never_leave_the_folder(tmp_path: Path) -> None:
    for name in ("../../outside", "/etc", "a/b", "..", "."):
        assert result_path(tmp_path, name, name).resolve().parents[1] == tmp_path / "results"


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)
def test_two_names_never_share_a_file(one: str, other: str) -> None:
    assert (result_path(Path(), one, "x") == result_path(Path(), other, "x")) == (one == other)


def test_every_file_of_a_report_is_written_and_shows_something(results: list[Result], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    write_all(results, tmp_path)
    written = write_report(tmp_path, baseline="teacher")
    names = [path.name for path in written]
    assert names == ["table.md", "table.csv", "categories.png", "tasks_against_baseline.png", "average_by_size.png"]
    for path in written[2:]:
        pixels = np.asarray(image.imread(path))
        assert min(pixels.shape[:2]) > 400
        assert pixels[..., :3].std() > 0.02


def test_a_baseline_without_results_is_refused_with_those_there_are(results: list[Result], tmp_path: Path) -> None:
    write_all(results, tmp_path)
    with pytest.raises(ValueError, match=r"'techer' has no results .* student, teacher"):
        write_report(tmp_path, baseline="techer")


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results"):
        write_report(tmp_path)
