"""Tables of results: tasks, means of their categories, the average over tasks, and changes against a baseline."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm2vec_gen_st.evaluation.plots import plot_bars, plot_changes, plot_sizes
from llm2vec_gen_st.evaluation.results import Result, read_results
from llm2vec_gen_st.evaluation.tasks import is_bright
from llm2vec_gen_st.files import write_atomically

TABLE = "table.md"
CSV_TABLE = "table.csv"
BARS, CHANGES, SIZES = "categories.png", "tasks_against_baseline.png", "average_by_size.png"

SAFETY = "Safety (lower is safer)"
BRIGHT = "BRIGHT"
AVERAGE = "Average over tasks"
# Benchmarks of their own in the paper, so not part of the average.
_APART = (BRIGHT, SAFETY)


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
        kind: ``task``, ``category`` or ``average``.
        label: Name of the task or category.
        category: Category it belongs to; empty for the average.
        metric: mteb's name of the score; empty for means.
        scores: Model to score in %, without those that lack it.
        changes: Model to change against the baseline in %, without those where there is nothing to compare.
    """

    kind: str
    label: str
    category: str
    metric: str
    scores: Mapping[str, float]
    changes: Mapping[str, float]


def category_of(result: Result) -> str:
    """The category a task is counted in: mteb's type, BRIGHT, or safety.

    Args:
        result: A result on the task.

    Returns:
        Its name.
    """
    if result.task_name == "AdvBench-IR":
        return SAFETY
    return BRIGHT if is_bright(result.task_name) else str(result.task["type"])


def table_rows(results: Sequence[Result], baseline: str | None = None) -> list[Row]:
    """Rows of the table: each category's tasks and their mean, then the average over tasks as in the paper.

    A mean is given only for models with results on all tasks it is taken over, so that means can be compared.
    The average leaves out BRIGHT and AdvBench-IR, which the paper reports apart.

    Args:
        results: Results of any number of models.
        baseline: Name of the model the others are compared with.

    Returns:
        The rows.

    Raises:
        ValueError: If results under one name are of different models, or those on one task of different data.
    """
    refuse_mixtures(results)
    models = list(dict.fromkeys(result.name for result in results))
    scores: dict[str, dict[str, float]] = {}
    tasks: dict[str, Result] = {}
    for result in results:
        tasks.setdefault(result.task_name, result)
        scores.setdefault(result.task_name, {})[result.name] = 100 * result.score
    categories: dict[str, list[str]] = {}
    for name in sorted(tasks):
        categories.setdefault(category_of(tasks[name]), []).append(name)

    def row(kind: str, label: str, category: str, metric: str, members: Sequence[str]) -> Row:
        found = {
            model: sum(scores[task][model] for task in members) / len(members)
            for model in models
            if all(model in scores[task] for task in members)
        }
        base = found.get(baseline) if baseline is not None else None
        changes = {} if not base else {model: 100 * (score - base) / abs(base) for model, score in found.items()}
        return Row(kind, label, category, metric, found, {m: change for m, change in changes.items() if m != baseline})

    rows: list[Row] = []
    for category in sorted(categories, key=lambda name: (name in _APART, name)):
        members = categories[category]
        rows += [row("task", name, category, str(tasks[name].task["metric"]), [name]) for name in members]
        rows.append(row("category", category, category, "", members))
    averaged = [name for category, members in categories.items() if category not in _APART for name in members]
    if averaged:
        rows.append(row("average", AVERAGE, "", "", averaged))
    return rows


def refuse_mixtures(results: Iterable[Result]) -> None:
    """Refuse results that no table should put side by side.

    Args:
        results: Results of any number of models.

    Raises:
        ValueError: If results under one name are of different models, or those on one task of different data; names
            two of them.
    """
    by_name: dict[str, Result] = {}
    by_task: dict[str, Result] = {}
    for result in results:
        other = by_name.setdefault(result.name, result)
        if other.model != result.model:
            raise ValueError(
                f"Under the name {result.name!r}, the results on {other.task_name} and on {result.task_name} are of "
                "different models, or of one whose settings have changed. Evaluate all of these tasks again with the "
                "present model, give it another name, or move the old result files away."
            )
        other = by_task.setdefault(result.task_name, result)
        if other.task["data"] != result.task["data"]:
            raise ValueError(
                f"The results of {other.name!r} and {result.name!r} on {result.task_name} are of different data. "
                "Evaluate both models on the present data, or move the old result file away."
            )


def markdown_table(rows: Sequence[Row], models: Sequence[str], baseline: str | None = None) -> str:
    """The table as Markdown: scores in %, with the change against the baseline in brackets.

    Args:
        rows: From :func:`table_rows`.
        models: Columns.
        baseline: Name of the model compared with.

    Returns:
        The text.
    """
    lines = [
        f"| task | metric | {' | '.join(_escaped(model) for model in models)} |",
        "|---|---|" + "---:|" * len(models),
    ]
    for row in rows:
        cells = []
        for model in models:
            text = f"{row.scores[model]:.2f}" if model in row.scores else "–"
            cells.append(text + (f" ({row.changes[model]:+.1f} %)" if model in row.changes else ""))
        label = _escaped(row.label)
        if row.kind != "task":
            number = sum(other.category == row.category for other in rows if other.kind == "task")
            if row.kind == "average":
                number = sum(other.kind == "task" and other.category not in _APART for other in rows)
            label = f"**{label}** (mean of {number})" if row.kind == "category" else f"**{label}** ({number})"
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {label} | {row.metric} | {' | '.join(cells)} |")
    note = "Scores in %." + (f" In brackets: change against {_escaped(baseline)}." if baseline is not None else "")
    return "\n".join([note, "", *lines, ""])


def csv_table(rows: Sequence[Row], models: Sequence[str], baseline: str | None = None) -> str:
    """The table as CSV, with numbers in full; arguments as in :func:`markdown_table`."""
    others = [model for model in models if model != baseline] if baseline is not None else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    changes = [f"{model}, change in % against {baseline}" for model in others]
    writer.writerow(["kind", "label", "category", "metric", *models, *changes])
    for row in rows:
        values = [row.scores.get(model, "") for model in models] + [row.changes.get(model, "") for model in others]
        writer.writerow([row.kind, row.label, row.category, row.metric, *values])
    return text.getvalue()


def check_baseline(output: Path, baseline: str | None, name: str) -> None:
    """Refuse a baseline that has no results to compare with.

    Args:
        output: Folder of the results.
        baseline: Name of the model compared with.
        name: Name of a model that is about to have results.

    Raises:
        ValueError: If there are none; names the models that have some.
    """
    if baseline is None or baseline == name:
        return
    models = sorted({result.name for result in read_results(output)})
    if baseline not in models:
        raise ValueError(
            f"The baseline {baseline!r} has no results in {output}; evaluate it first. "
            f"There are results of: {', '.join(models) or 'no model'}."
        )


def write_report(output: str | Path, *, baseline: str | None = None) -> list[Path]:
    """Write the tables and plots of all results in an output folder.

    Args:
        output: Folder given to ``evaluate``.
        baseline: Name of the model compared with.

    Returns:
        The files: ``table.md``, ``table.csv`` and the plots for which there is enough to show.

    Raises:
        ValueError: If there are no results, or none of the baseline, or if they do not go together (see
            :func:`refuse_mixtures`).
    """
    output = Path(output)
    results = read_results(output)
    if not results:
        raise ValueError(f"{output}: there are no results to report.")
    check_baseline(output, baseline, "")
    models = sorted({result.name for result in results}, key=lambda name: (name != baseline, name))
    rows = table_rows(results, baseline)
    texts = {TABLE: markdown_table(rows, models, baseline), CSV_TABLE: csv_table(rows, models, baseline)}
    written = []
    for name, text in texts.items():
        _write_text(output / name, text)
        written.append(output / name)
    means = {row.label: row.scores for row in rows if row.kind != "task"}
    written.append(plot_bars(output / BARS, means, models))
    if baseline is not None and len(models) > 1:
        tasks = {row.label: row.scores for row in rows if row.kind == "task" and row.category != SAFETY}
        written.append(plot_changes(output / CHANGES, tasks, models, baseline))
    sizes = {result.name: int(result.model["parameters"]) for result in results}
    averages = next((row.scores for row in rows if row.kind == "average"), {})
    sized = {model: score for model, score in averages.items() if sizes[model] > 0}
    if sized:
        written.append(plot_sizes(output / SIZES, sized, sizes, models))
    return written


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)


def _escaped(name: str | None) -> str:
    return str(name).replace("|", "\\|")
