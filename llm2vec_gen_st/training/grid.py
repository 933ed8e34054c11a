"""Ablations: one run for each value that is tried, all scored alike, as one table and the paper's figures."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.checkpoints.directory import MODULES_FILE
from llm2vec_gen_st.files import read_jsonl, write_atomically, write_json
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.config import read_json_object
from llm2vec_gen_st.modules.lora import remove_lora
from llm2vec_gen_st.training.data import load_rows, split_held_out
from llm2vec_gen_st.training.evaluation import own_response_recall, reconstruction_per_token
from llm2vec_gen_st.training.figures import plot_axis
from llm2vec_gen_st.training.recipes import Recipe, resolve
from llm2vec_gen_st.training.record import RUN_FOLDER, describe, read_record
from llm2vec_gen_st.training.run import CHECKPOINTS, train

if TYPE_CHECKING:
    from datasets import Dataset

REFERENCE = "reference"
LOSSES = ("both", "alignment", "reconstruction")
# With these, queries that score one run would be among those that another was trained on.
_FIXED = ("base", "seed", "held_out", "include")
TABLE, CSV_TABLE = "table.md", "table.csv"

OWN, TAUGHT, DISTANCE, RECONSTRUCTION = "own response R@1", "teacher R@1", "teacher distance", "nats a token"
AVERAGE = "average of tasks"


@dataclass(frozen=True)
class Point:
    """One value of one axis, and the run that has it.

    Args:
        axis: What is varied; empty for the reference.
        value: The value, as it was given.
        run: Name of the run; values that change nothing are the reference's.
        recipe: The run's recipe, complete.
    """

    axis: str
    value: str
    run: str
    recipe: Recipe

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.axis}={self.value}" if self.axis else REFERENCE


@dataclass(frozen=True)
class Scored:
    """A point with its scores.

    Args:
        point: The point.
        scores: Name of the score to value; a score that a run cannot have is left out.
    """

    point: Point
    scores: Mapping[str, float] = field(default_factory=dict)


def points(recipe: Recipe, axes: Mapping[str, Sequence[str]]) -> list[Point]:
    """The runs of a grid: the reference, and each value of each axis with everything else as in the reference.

    Args:
        recipe: The reference's recipe, complete.
        axes: What is varied: ``suffix`` (tokens in all, half of them thought tokens; Figure 4), ``losses`` (``both``,
            ``alignment``, ``reconstruction``; Table 3), ``teacher`` (Figure 6), ``init``, or any field of a recipe; to
            its values.

    Returns:
        The points, the reference first.

    Raises:
        ValueError: If an axis or value is not known.

    Example:
        >>> found = points(Recipe(base="tiny", teacher="self"), {"suffix": ["2", "20"], "losses": ["alignment"]})
        >>> [(point.label, point.run) for point in found]
        [('reference', 'reference'), ('suffix=2', 'suffix=2'), ('suffix=20', 'reference'),
         ('losses=alignment', 'losses=alignment')]
    """
    found = [Point("", "", REFERENCE, recipe)]
    for axis, values in axes.items():
        for value in values:
            changed = _changed(recipe, axis, value)
            same = next((point.run for point in found if point.recipe == changed), f"{axis}={value}")
            found.append(Point(axis, value, same.replace("/", "_"), changed))
    return found


def _changed(recipe: Recipe, axis: str, value: str) -> Recipe:
    if axis in _FIXED:
        raise ValueError(
            f"{axis} cannot be varied in one grid: all its runs have the same LLM, data and held-out queries."
        )
    if axis == "teacher":
        return replace(recipe, teacher=value)
    if axis == "suffix":
        if not value.isdecimal() or int(value) < 2 or int(value) % 2:
            raise ValueError(f"A suffix is an even number of tokens, got {value!r}; half of them are thought tokens.")
        return replace(recipe, thought_tokens=int(value) // 2, compression_tokens=int(value) // 2)
    # A head of random weights is far from where ridge regression puts one, and needs the suffix's rate.
    random: dict[str, Any] = {"init": "random", "ridge_refit": False, "align_learning_rate": None}
    if axis == "losses":
        changes: dict[str, dict[str, Any]] = {
            "both": {},
            "alignment": {"recon_weight": 0.0, "recon_steps": 0},
            # Without a teacher there is nothing to regress on.
            "reconstruction": {**random, "align_weight": 0.0, "recon_weight": recipe.recon_weight or 1.0},
        }
        if value not in changes:
            raise ValueError(f"losses are {', '.join(LOSSES)}, got {value!r}.")
        return replace(recipe, **changes[value])
    if axis == "init" and value == "random" and recipe.init == "ridge":
        return replace(recipe, **random)
    return recipe.with_overrides({axis: value})


def run_grid(
    data: str | Path | Dataset,
    output: str | Path,
    axes: Mapping[str, Sequence[str]],
    *,
    base: str | Backbone | None = None,
    teacher: str | None = None,
    recipe: str | Path | Recipe | None = None,
    tasks: Sequence[str] = (),
    partial: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> list[Scored]:
    """Train and score one student for each point of a grid; the same call again runs only what is missing.

    Every point is an ordinary run of :func:`~llm2vec_gen_st.training.train` in ``output/runs/NAME``, on the same data,
    split and seed. All are scored on the same held-out queries: share of queries that find their own response among
    all of them as the student embeds both (``own response R@1``) and as the run's own teacher embeds the responses
    (``teacher R@1``, with ``teacher distance``, the squared distance as a share of that of the mean), and the
    reconstruction's ``nats a token``. ``output`` gets ``table.md``, ``table.csv`` and a figure for each axis.

    Args:
        data: As in ``train``.
        output: Folder of the grid.
        axes: What is varied, see :func:`points`.
        base: The frozen LLM; loaded once.
        teacher: The reference's teacher.
        recipe: The reference's recipe.
        tasks: Folders or names of evaluation tasks (extra ``mteb``) on which every student is scored too.
        partial: As in ``train``.
        progress: Whether progress bars are shown.
        **overrides: Fields of the reference's recipe to replace.

    Returns:
        The points with their scores.

    Raises:
        ValueError: If an axis is not known, no queries are held out, the folder holds other runs, or several processes
            are at it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("A grid runs in one process; train() its runs one by one under torchrun instead.")
    output = Path(output)
    base_id = base.reference.id if isinstance(base, Backbone) else base
    reference = resolve(recipe, base=base_id, teacher=teacher, overrides=overrides)
    grid = points(reference, axes)
    held = split_held_out(load_rows(data, reference, partial=partial), reference)[1]
    if len(held) < 2:
        raise ValueError("A grid is scored on held-out queries: set held_out, and give at least ten rows.")
    backbones: dict[str, Backbone] = {}
    scores: dict[str, dict[str, float]] = {}
    for point in grid:
        if point.run in scores:
            continue
        # Hard negatives are rows of some recipes only.
        own_rows = load_rows(data, point.recipe, partial=partial)
        record = json.loads(json.dumps(describe(point.recipe, point.recipe.teacher, own_rows, None)))
        place = output / "results" / f"{point.run}.json"
        kept = read_json_object(place) if place.is_file() else {}
        if kept.get("record") == record and kept.get("tasks") == list(tasks):
            scores[point.run] = kept["scores"]
            continue
        if progress:
            print(f"Run {point.run}:", flush=True)
        if isinstance(base, Backbone):
            backbone = base
        elif point.recipe.dtype in backbones:
            backbone = backbones[point.recipe.dtype]
        else:
            backbone = load_backbone(str(point.recipe.base), model_kwargs={"dtype": point.recipe.dtype})
            backbones = {point.recipe.dtype: backbone}
        folder = output / "runs" / point.run
        if _is_finished(folder, record):
            model = LLM2VecGen(str(folder), backbone=backbone)
        else:
            model = train(
                data, folder, base=backbone, recipe=point.recipe, label_cache=output / "labels.sqlite",
                partial=partial, progress=progress,
            )  # fmt: skip
        scores[point.run] = _score(model, point, folder, held, output, tasks, progress)
        write_json(place, {"record": record, "tasks": list(tasks), "scores": scores[point.run]})
        if model.suffix_transformer.lora is not None:
            remove_lora(backbone.llm)
    scored = [Scored(point, scores[point.run]) for point in grid]
    write_report(output, scored)
    return scored


def _is_finished(folder: Path, record: dict[str, Any]) -> bool:
    """Whether a run has come to its end: its checkpoints go last."""
    saved = (folder / MODULES_FILE).is_file() and not (folder / RUN_FOLDER / CHECKPOINTS).exists()
    return saved and read_record(folder) == record


def _score(
    model: LLM2VecGen, point: Point, folder: Path, held: Dataset, output: Path, tasks: Sequence[str], progress: bool
) -> dict[str, float]:
    recipe = point.recipe
    queries = [recipe.query_prompts[0] + query for query in held["query"]]
    found = {
        OWN: own_response_recall(model, queries, [recipe.document_prompt + text for text in held["response"]]),
        RECONSTRUCTION: reconstruction_per_token(
            model,
            [
                {"query": query, "response": response, "flag": flag}
                for query, response, flag in zip(queries, held["response"], held["flag"], strict=True)
            ],
            max_response_tokens=recipe.max_response_tokens,
        ),
    }
    *_, last = read_jsonl(folder / RUN_FOLDER / "log.jsonl")
    for name, key in ((TAUGHT, "response_recall_at_1"), (DISTANCE, "relative_distance")):
        if f"held_out_0_{key}" in last:
            found[name] = last[f"held_out_0_{key}"]
    if tasks:
        from llm2vec_gen_st.evaluation import evaluate

        results = evaluate(model, list(tasks), output / "evaluation", name=point.run, progress=progress)
        found.update({result.task_name: result.score for result in results})
        found[AVERAGE] = sum(result.score for result in results) / len(results)
    return found


def write_report(output: Path, scored: Sequence[Scored]) -> None:
    """Write the tables, and a figure for each axis.

    Args:
        output: The grid's folder.
        scored: Its points.
    """
    names = list(dict.fromkeys(name for row in scored for name in row.scores))
    first = [name for name in (OWN, TAUGHT, DISTANCE, RECONSTRUCTION, AVERAGE) if name in names]
    names = first + [name for name in names if name not in first]
    lines = [f"| run | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["axis", "value", "run", *names, "recipe"])
    for row in scored:
        cells = [f"{row.scores[name]:.3f}" if name in row.scores else "" for name in names]
        lines.append(f"| {row.point.label} | {' | '.join(cells)} |")
        changed = {key: value for key, value in asdict(row.point.recipe).items() if value != _default(key)}
        values = [row.scores.get(name, "") for name in names]
        table.writerow([row.point.axis, row.point.value, row.point.run, *values, json.dumps(changed)])
    _write(output / TABLE, "\n".join(lines) + "\n")
    _write(output / CSV_TABLE, text.getvalue())
    for axis in dict.fromkeys(row.point.axis for row in scored if row.point.axis):
        chosen = [row for row in scored if row.point.axis == axis]
        plot_axis(
            output / f"{axis}.png",
            axis,
            [row.point.value for row in chosen],
            {name: [row.scores.get(name) for row in chosen] for name in first if name != DISTANCE},
            reference=[row.point.run == REFERENCE for row in chosen],
        )


def _default(name: str) -> Any:
    return getattr(Recipe(), name)


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)
