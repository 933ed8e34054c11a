"""The command that compares ways of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llm2vec_gen_st.cli.options import key_and_value
from llm2vec_gen_st.cli.training import overrides_of


def grid(
    responses: Annotated[
        Path,
        typer.Argument(help="Folder written by `respond`, or a .jsonl or .parquet file.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs, the tables and the figures.")],
    vary: Annotated[
        list[str],
        typer.Option(
            help="What is varied, and how: suffix=2,10,20, losses=both,alignment,reconstruction, "
            "teacher=self,all-MiniLM-L6-v2, init=ridge,random, or any field of a recipe. Repeatable."
        ),
    ],
    base: Annotated[str | None, typer.Option(help="The frozen LLM; the recipe's if not given.")] = None,
    teacher: Annotated[str | None, typer.Option(help="The reference's teacher; the recipe's if not given.")] = None,
    recipe: Annotated[str | None, typer.Option(help="The reference's recipe; chosen by the base if not given.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a field of the recipe: key=value. Repeatable.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", "-t", help="Evaluation tasks for every student, as in `evaluate`. Repeatable."),
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Accept responses that are not all written yet.")] = False,
) -> None:
    r"""Compare ways of training: one run a value, all scored alike, as a table and figures.

    The same command again runs only what is missing.

    Example:
        llm2vec-gen grid responses --output grid --recipe smollm2-135m \
            --vary suffix=2,10,20,40 --vary losses=both,alignment,reconstruction --set max_steps=100
    """
    if not responses.exists():
        raise FileNotFoundError(f"{responses}: there are no responses; write them with `llm2vec-gen respond`.")
    axes = _axes(vary)
    from llm2vec_gen_st.training.grid import TABLE, run_grid

    options: dict[str, Any] = {"base": base, "teacher": teacher, "recipe": recipe}
    options = {key: value for key, value in options.items() if value is not None}
    options.update(overrides_of(settings or []))
    run_grid(responses, output, axes, tasks=tasks or (), partial=partial, **options)
    print((output / TABLE).read_text(encoding="utf-8"), end="")
    print(f"\n{output}: runs, tables and figures.")


def _axes(vary: Sequence[str]) -> dict[str, list[str]]:
    """Axes and their values from ``axis=value,value``.

    Example:
        >>> _axes(["suffix=2,10", "init=ridge,random"])
        {'suffix': ['2', '10'], 'init': ['ridge', 'random']}
    """
    found: dict[str, list[str]] = {}
    for text in vary:
        axis, values = key_and_value("--vary", text, "axis=value,value")
        if not values:
            raise ValueError(f"--vary {text!r} names no values.")
        found.setdefault(axis, []).extend(value for value in values.split(",") if value)
    return found
