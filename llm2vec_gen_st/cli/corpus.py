"""The command that encodes a corpus part by part, on one machine or many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llm2vec_gen_st.cli.options import BatchSize, Dtype, DtypeOption, Model, PromptName, instruction_name, load_model
from llm2vec_gen_st.files import TEXT_COLUMNS


def encode_corpus(
    model: Model,
    corpus: Annotated[
        list[Path],
        typer.Argument(
            help="Files (.jsonl, .jsonl.gz, .parquet) with a column of ids, and folders.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the Parquet parts.")],
    shard: Annotated[str, typer.Option(help="i/N: encode the i-th (0-based) of N equal shares only.")] = "0/1",
    id_column: Annotated[str, typer.Option(help="Column of the ids.")] = "id",
    column: Annotated[
        str | None, typer.Option(help=f"Column of the texts; the first of {', '.join(TEXT_COLUMNS)}.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Column to write beside the vectors, such as text; all but text as JSON. Repeatable."),
    ] = None,
    rows_per_part: Annotated[int, typer.Option(min=1, help="Passages of one part.")] = 8192,
    prompt_name: PromptName = "document",
    batch_size: BatchSize = 32,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    r"""Encode a corpus of any size, resumably: the same command again goes on where it stopped.

    Example:
        llm2vec-gen encode-corpus llm2vec-gen-smollm2-135m corpus.parquet --output vectors \
            --keep text --shard 0/4
    """
    from llm2vec_gen_st.corpus import encode_corpus as encode
    from llm2vec_gen_st.corpus.plan import plan_corpus

    options: dict[str, Any] = {
        "rows_per_part": rows_per_part,
        "id_column": id_column,
        "text_column": column,
        "keep": tuple(keep or ()),
    }
    # What is wrong with the corpus is told before the model is loaded.
    plan = plan_corpus(corpus, output, **options)
    encode(
        load_model(model, dtype),
        corpus,
        output,
        shard=shard,
        prompt_name=instruction_name(prompt_name),
        batch_size=batch_size,
        **options,
    )
    there = sum(1 for _ in output.glob("part-*.parquet"))
    print(f"{output}: shard {shard} is encoded; {there} of {len(plan.slices)} parts ({plan.rows} passages) are there.")
