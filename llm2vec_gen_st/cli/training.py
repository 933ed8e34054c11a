"""Commands that make a student: let an LLM respond, and train on the responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llm2vec_gen_st.cli.options import BatchSize, Dtype, DtypeOption, key_and_value, model_kwargs, plain

if TYPE_CHECKING:
    from llm2vec_gen_st.training import Recipe


class PartFormat(str, Enum):
    """File format of response parts."""

    parquet = "parquet"
    jsonl = "jsonl"


class Backend(str, Enum):
    """What runs the LLM that responds."""

    transformers = "transformers"
    vllm = "vllm"


def respond(
    queries: Annotated[Path, typer.Argument(help="A .txt, .jsonl or .parquet file of queries.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the responses.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The LLM that writes: hub id or directory.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 500,
    batch_size: BatchSize = 64,
    shard: Annotated[str, typer.Option(help="i/N: write every N-th batch only, starting with batch i.")] = "0/1",
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 for greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling mass.")] = 1.0,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    dtype: DtypeOption = Dtype.auto,
    part_format: Annotated[PartFormat, typer.Option("--format", help="File format of the parts.")] = PartFormat.parquet,
    backend: Annotated[
        Backend, typer.Option(help="What runs the LLM; vllm is served well by a --batch-size of 1000 and more.")
    ] = Backend.transformers,
) -> None:
    r"""Let an LLM respond to queries, resumably: the same command again goes on where it stopped.

    Example:
        llm2vec-gen respond queries.txt --output responses --max-new-tokens 96 \
            --model HuggingFaceTB/SmolLM2-135M-Instruct
    """
    if not queries.is_file():
        raise FileNotFoundError(f"{queries}: there is no such file of queries.")
    from llm2vec_gen_st.backbone import load_backbone
    from llm2vec_gen_st.responses import VllmBackend, write_responses

    folder = write_responses(
        queries,
        output,
        VllmBackend(model, dtype=dtype.value)
        if backend is Backend.vllm
        else load_backbone(model, model_kwargs=model_kwargs(dtype)),
        batch_size=batch_size,
        shard=shard,
        part_format=part_format.value,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        system=system,
    )
    print(f"{folder}: responses written.")


def train(
    responses: Annotated[
        Path | None,
        typer.Argument(
            help="Folder written by `respond`, or a .jsonl or .parquet file; --dry-run goes without.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the student.")] = None,
    base: Annotated[
        str | None, typer.Option(help="The frozen LLM: hub id or directory; the recipe's if not given.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="'self', the name or directory of a SentenceTransformer, or an LLM2Vec adapter; the recipe's if not "
            "given."
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Name of a recipe, or a .json file; chosen by the base if not given.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a field of the recipe: key=value. Repeatable.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Go on from a saved student instead of an untrained one.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Accept responses that are not all written yet.")] = False,
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="An experiment tracker that is installed: tensorboard, trackio, wandb, ... Repeatable."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show recipe, parameter counts, memory and cost, and stop; needs no weights, and no responses yet.",
        ),
    ] = False,
) -> None:
    r"""Train a student on queries and responses; the same command again goes on where it stopped.

    Under torchrun or accelerate launch (``torchrun --nproc-per-node 8 -m llm2vec_gen_st.cli train ...``) the processes
    train one student together.

    Example:
        llm2vec-gen train responses --output student --teacher all-MiniLM-L6-v2 \
            --base HuggingFaceTB/SmolLM2-135M-Instruct --set epochs=2
    """
    if responses is None and not dry_run:
        raise ValueError("Training needs responses; write them with `llm2vec-gen respond`, and give their folder.")
    if responses is not None and not responses.exists():
        raise FileNotFoundError(f"{responses}: there are no responses; write them with `llm2vec-gen respond`.")
    overrides = overrides_of(settings or [])
    from llm2vec_gen_st.training import train as train_student
    from llm2vec_gen_st.training.processes import is_main

    if dry_run:
        from llm2vec_gen_st.training.recipes import resolve

        _show_estimate(resolve(recipe, base=base, teacher=teacher, overrides=overrides), responses, partial)
        return
    assert responses is not None
    if output is None:
        raise ValueError("The student needs a folder to go into: --output DIR.")
    options: dict[str, Any] = {"base": base, "teacher": teacher, "recipe": recipe, "start": start}
    options = {key: value for key, value in options.items() if value is not None}
    options.update(overrides, partial=partial, report_to=report_to or "none")
    train_student(responses, output, **options)
    if is_main():
        print(f"{output}: student saved; load it with LLM2VecGen({str(output)!r}).")


def _show_estimate(recipe: Recipe, responses: Path | None, partial: bool) -> None:
    """Print what a run would take."""
    from llm2vec_gen_st.training.data import load_rows, split_held_out, student_rows
    from llm2vec_gen_st.training.estimate import estimate

    rows = None
    if responses is not None:
        fit, _ = split_held_out(load_rows(responses, recipe, partial=partial), recipe)
        rows = student_rows(fit, recipe)
    found = estimate(recipe, rows)
    given = Table("field", "value", title="Recipe")
    for field in fields(recipe):
        given.add_row(field.name, plain(repr(getattr(recipe, field.name))))
    counts = Table("", "", title="Parameters", show_header=False)
    counts.add_row("trainable", f"{found.trainable:,}")
    counts.add_row("frozen", f"{found.frozen:,}")
    counts.add_row("embedding dimension", plain(f"{found.embedding_dim} ({found.dimension_source})"))
    memory = Table("what is counted, at the longest rows", "GiB", title="Memory of one device")
    for what, size in found.memory.items():
        memory.add_row(plain(what), f"{size / 2**30:.2f}")
    memory.add_section()
    memory.add_row("together", f"{sum(found.memory.values()) / 2**30:.2f}")
    cost = Table("stage", "steps", "tokens a step", "FLOPs a step", "tokens", "FLOPs", title="Cost on one device")
    for stage in found.stages:
        totals = [stage.tokens, stage.flops]
        all_steps = ["?"] * 2 if stage.steps is None else [f"{value * stage.steps:.3g}" for value in totals]
        steps = "?" if stage.steps is None else f"{stage.steps:,}"
        cost.add_row(stage.name, steps, *(f"{value:.3g}" for value in totals), *all_steps)
    lengths = (
        f"{found.lengths.query:.0f} tokens a query, {found.lengths.response:.0f} a response: {found.lengths_source}; "
        f"{'no rows yet' if found.rows is None else f'{found.rows:,} rows, documents included'}."
    )
    console = Console()
    for part in (given, counts, memory, cost):
        console.print(part)
    console.print(plain(lengths))
    console.print(
        "Not counted: the teacher and its embeddings, ridge regressions, evaluation, and what the allocator keeps."
    )


def recipe_rows(student: str) -> list[tuple[str, str]]:
    """How a student was trained, as far as its folder records it: rows of a table.

    Args:
        student: Directory, or name of a student.
    """
    from llm2vec_gen_st.training.record import changed_fields, read_record

    record = read_record(student)
    if record is None:
        return []
    rows = [(f"trained, {key}", str(record[key])) for key in ("base", "teacher", "start", "rows") if record.get(key)]
    return rows + [(f"recipe, {name}", repr(value)) for name, value in changed_fields(record).items()]


def overrides_of(settings: Sequence[str]) -> dict[str, str]:
    """Recipe fields from ``key=value``.

    Raises:
        ValueError: If a setting is not of that form, or no recipe has such a field.

    Example:
        >>> overrides_of(["epochs=2", "suffix_text=a=b"])
        {'epochs': '2', 'suffix_text': 'a=b'}
    """
    found = dict(key_and_value("--set", setting) for setting in settings)
    if found:
        from llm2vec_gen_st.training import Recipe

        known = {field.name for field in fields(Recipe)} - {"base", "teacher"}
        if unknown := sorted(found.keys() - known):
            raise ValueError(f"--set: no recipe has the fields {unknown}; known are {sorted(known)}.")
    return found
