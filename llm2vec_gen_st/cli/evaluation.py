"""Command that measures a model's quality on tasks, and compares models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm2vec_gen_st.cli.options import BatchSize, Dtype, DtypeOption, key_and_value, model_kwargs

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Built-in name, name of the paper, directory, or hub id; any sentence-transformers model works. "
            "With --base also the name of a baseline: mean, last, echo, hyde, llm2vec, inbedder, gircse.",
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
    base: Annotated[
        str | None,
        typer.Option(
            help="The LLM that a baseline is made of: hub id or directory; for llm2vec, inbedder and gircse also a "
            "trained one."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of a baseline: key=value, such as answers=4 for hyde. Repeatable."),
    ] = None,
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
        llm2vec-gen evaluate echo --tasks my-data --output results \
            --base HuggingFaceTB/SmolLM2-135M-Instruct

        llm2vec-gen evaluate llm2vec-gen-smollm2-135m --tasks my-data \
            --output results --baseline echo
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
    options = _baseline_options(model, settings or [], output)
    logging.disable_progress_bar()
    loaded = load_model(model, base=base, options=options, model_kwargs=model_kwargs(dtype))
    _warn_of_no_training(model, loaded)
    try:
        evaluate_model(
            loaded,
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


def _baseline_options(model: str, settings: Sequence[str], output: Path) -> dict[str, Any]:
    """Options of a baseline's constructor from ``key=value``; what its LLM writes is kept with the results."""
    from llm2vec_gen_st.baselines.registry import known_options, options_from_text
    from llm2vec_gen_st.evaluation.loading import names_baseline

    if not names_baseline(model):
        if settings:
            raise ValueError(f"--set goes with the name of a baseline, and {model!r} is none.")
        return {}
    options = options_from_text(model, dict(key_and_value("--set", setting) for setting in settings))
    if "cache" in known_options(model):
        options.setdefault("cache", str(output / f"{model}-answers.sqlite"))
    return options


def _warn_of_no_training(model: str, loaded: SentenceTransformer) -> None:
    from llm2vec_gen_st.baselines.registry import BASELINES
    from llm2vec_gen_st.evaluation.loading import names_baseline

    if names_baseline(model) and BASELINES[model].trained and getattr(loaded[0], "lora", None) is None:
        print(f"{model} is meant to be trained: on a plain LLM its scores only show where training starts.", flush=True)
