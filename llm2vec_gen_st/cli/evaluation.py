"""Command that measures a model's quality on tasks, and compares models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llm2vec_gen_st.cli.options import BatchSize, Dtype, DtypeOption, model_kwargs


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Built-in name, name of the paper, directory, or hub id; any sentence-transformers model works.",
            show_default=False,
        ),
    ],
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks",
            "-t",
            help="mteb-lite, mteb-eng-v2, bright, advbench-ir, names of mteb's tasks, or folders of JSON lines; "
            "repeatable, or separated by commas.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of results, tables and plots.")],
    name: Annotated[
        str | None, typer.Option(help="What the model is called in the tables; the last part of MODEL if not given.")
    ] = None,
    instructions: Annotated[
        Path | None,
        typer.Option(help="A JSON file, task to instruction; the built-in ones for tasks it does not name."),
    ] = None,
    batch_size: BatchSize = 32,
    baseline: Annotated[
        str | None, typer.Option(help="Name of an evaluated model that all others are compared with.")
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Run tasks again whose results are there.")] = False,
) -> None:
    r"""Evaluate a model on tasks of mteb, of the paper, or of your own; what is there already is not run again.

    Example:
        llm2vec-gen evaluate llm2vec-gen-smollm2-135m --tasks my-data \
            --output results --baseline all-MiniLM-L6-v2
    """
    if instructions is not None and not instructions.is_file():
        raise FileNotFoundError(f"{instructions}: there is no such file of instructions.")
    wanted = [part for item in tasks for part in ([item] if Path(item).exists() else item.split(",")) if part]
    from transformers.utils import logging

    from llm2vec_gen_st.evaluation import EvaluationError, find_tasks
    from llm2vec_gen_st.evaluation import evaluate as evaluate_model
    from llm2vec_gen_st.evaluation.loading import load_model
    from llm2vec_gen_st.evaluation.report import TABLE, check_baseline

    called = name or Path(model).name
    found = find_tasks(wanted)
    check_baseline(output, baseline, called)
    logging.disable_progress_bar()
    try:
        evaluate_model(
            load_model(model, model_kwargs=model_kwargs(dtype)),
            found,
            output,
            name=called,
            instructions=instructions,
            batch_size=batch_size,
            baseline=baseline,
            overwrite=overwrite,
        )
    except EvaluationError as error:
        raise ValueError(str(error)) from error
    print((output / TABLE).read_text(encoding="utf-8"), end="")
    print(f"\n{output}: results, tables and plots.")
