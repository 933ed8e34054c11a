"""Commands on a student: demonstrate, encode, decode, convert, describe."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from llm2vec_gen_st.cli.options import (
    BatchSize,
    Dtype,
    DtypeOption,
    Model,
    PromptName,
    instruction_name,
    load_model,
    plain,
)
from llm2vec_gen_st.cli.rows import input_rows, write_vectors
from llm2vec_gen_st.cli.training import recipe_rows
from llm2vec_gen_st.files import TEXT_COLUMNS


class Form(str, Enum):
    """Checkpoint form."""

    ours = "ours"
    official = "official"
    native = "native"


def demo(
    model: Annotated[str | None, typer.Option(help="Another model than the built-in one.")] = None,
    dtype: DtypeOption = Dtype.auto,
    questions: Annotated[int, typer.Option(min=0, help="Questions shown in full.")] = 3,
) -> None:
    """Search a small collection of passages with the built-in model, and read its embeddings.

    Example:
        llm2vec-gen demo
    """
    from llm2vec_gen_st.demo.run import MODEL, run_demo

    run_demo(model or MODEL, dtype=None if dtype is Dtype.auto else dtype.value, shown=questions)


def encode(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .npy, .parquet or .jsonl file.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to embed.", show_default=False)] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input", "-i", help="A .txt (a text a line), .jsonl or .parquet file instead.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help=f"Column of the input with the texts; the first of {', '.join(TEXT_COLUMNS)}.")
    ] = None,
    prompt_name: PromptName = "query",
    batch_size: BatchSize = 32,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    r"""Embed texts into a file: an array (.npy), or the rows with a column 'embedding' (.parquet, .jsonl).

    Example:
        llm2vec-gen encode llm2vec-gen-smollm2-135m --output vectors.npy \
            'where do polar bears live?'
    """
    if output.suffix not in (".npy", ".parquet", ".jsonl"):
        raise ValueError(f"{output}: vectors are written as .npy, .parquet or .jsonl.")
    rows = input_rows(texts, input_file, column)
    loaded = load_model(model, dtype)
    vectors = loaded.encode(
        [row["text"] for row in rows],
        prompt_name=instruction_name(prompt_name),
        batch_size=batch_size,
        show_progress_bar=len(rows) > batch_size,
    )
    write_vectors(output, rows, vectors)
    print(f"{output}: {vectors.shape[0]} embeddings of {vectors.shape[1]} dimensions.")


def decode(
    model: Model,
    texts: Annotated[list[str], typer.Argument(help="Texts to embed and to decode.", show_default=False)],
    prompt_name: PromptName = "query",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest decoded text, in tokens.")] = 64,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Show what the embeddings of texts say when the frozen LLM speaks them.

    Example:
        llm2vec-gen decode llm2vec-gen-smollm2-135m 'where do polar bears live?'
    """
    loaded = load_model(model, dtype)
    decoded = loaded.decode(texts, prompt_name=instruction_name(prompt_name), max_new_tokens=max_new_tokens)
    table = Table("text", "decoded from its embedding", show_lines=True)
    for text, said in zip(texts, decoded, strict=True):
        table.add_row(plain(text), plain(said))
    Console().print(table)


def convert(
    model: Model,
    output: Annotated[Path, typer.Argument(help="Folder of the converted checkpoint.", show_default=False)],
    to: Annotated[
        Form,
        typer.Option(help="ours (small), official (the authors' files), native (stock sentence-transformers modules)."),
    ],
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Write a checkpoint in another form.

    Example:
        llm2vec-gen convert llm2vec-gen-smollm2-135m smollm2-native --to native
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty folder; choose another one.")
    loaded = load_model(model, dtype)
    if to is Form.ours:
        loaded.save_pretrained(str(output))
    else:
        from llm2vec_gen_st import checkpoints

        (checkpoints.export_official if to is Form.official else checkpoints.export_native)(loaded, output)
    print(f"{output}: written ({to.value} form).")


def info(model: Model, dtype: DtypeOption = Dtype.auto) -> None:
    """Show a model's base, fingerprint, sizes, instructions, suffix, parameter counts and, if recorded, its recipe.

    Example:
        llm2vec-gen info llm2vec-gen-smollm2-135m
    """
    loaded = load_model(model, dtype)
    transformer, head = loaded.suffix_transformer, loaded.response_head
    own = {id(parameter): parameter.numel() for parameter in [transformer.suffix, *head.parameters()]}
    if transformer.lora is not None:
        from llm2vec_gen_st.modules.lora import lora_parameters

        own.update({id(parameter): parameter.numel() for parameter in lora_parameters(loaded.llm).values()})
    frozen = sum(parameter.numel() for parameter in loaded.llm.parameters() if id(parameter) not in own)
    table = Table(show_header=False)
    for key, value in (
        ("model", model),
        ("base model", transformer.base.id),
        ("base revision", transformer.base.revision or "not recorded"),
        ("base fingerprint", transformer.base.fingerprint or "none"),
        ("base dtype", str(loaded.llm.dtype).removeprefix("torch.")),
        ("hidden size", str(head.hidden_size)),
        ("embedding dimension", str(loaded.get_embedding_dimension())),
        ("longest input", f"{transformer.max_seq_length} tokens, suffix included"),
        ("suffix", f"{transformer.thought_tokens} thought + {transformer.compression_tokens} compression tokens"),
        ("LoRA", f"rank {transformer.lora['r']}" if transformer.lora is not None else "none"),
        ("trainable parameters", f"{sum(own.values()):,}"),
        ("frozen parameters", f"{frozen:,}"),
        *((f"instruction {name!r}", repr(text)) for name, text in loaded.prompts.items()),
        *recipe_rows(model),
    ):
        table.add_row(key, plain(value))
    Console().print(table)
