"""The command ``llm2vec-gen``: a thin shell over the package's public functions.

Everything heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from llm2vec_gen_st import __version__
from llm2vec_gen_st.extras import MissingExtraError

if TYPE_CHECKING:
    import numpy as np

    from llm2vec_gen_st.model import LLM2VecGen

TEXT_COLUMNS = ("text", "query", "passage")


class Dtype(str, Enum):
    """Number format of the base model's weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class PartFormat(str, Enum):
    """File format of response parts."""

    parquet = "parquet"
    jsonl = "jsonl"


class Form(str, Enum):
    """Checkpoint form."""

    ours = "ours"
    official = "official"
    native = "native"


class _Commands(TyperGroup):
    """Prints errors that the user can act on as one sentence, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params.get("debug") or not _is_known(error):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            Console(stderr=True).print(f"Error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error


def _is_known(error: Exception) -> bool:
    """Whether an error's message is written for the user.

    Example:
        >>> _is_known(ValueError("no such column")), _is_known(KeyError("column"))
        (True, False)
    """
    if isinstance(error, ValueError | OSError | MissingExtraError):
        return True
    # Looked up, not imported: it can only have been raised if its module is there.
    backbone = sys.modules.get("llm2vec_gen_st.backbone")
    return backbone is not None and isinstance(error, backbone.BaseModelError)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="LLM2Vec-Gen: embed what the LLM would answer, and read the embeddings back as text.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str, typer.Argument(help="Built-in name, name of the paper, directory, or hub id.", show_default=False)
]
DtypeOption = Annotated[Dtype, typer.Option(help="Number format of the base model's weights.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts run at once.")]
PromptName = Annotated[
    str, typer.Option(help="Name of the instruction, such as query or document; 'none' for no instruction.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show full tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """LLM2Vec-Gen: embed what the LLM would answer, and read the embeddings back as text."""


@app.command()
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


@app.command()
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
    rows = _input_rows(texts, input_file, column)
    loaded = _load(model, dtype)
    vectors = loaded.encode(
        [row["text"] for row in rows],
        prompt_name=_instruction(prompt_name),
        batch_size=batch_size,
        show_progress_bar=len(rows) > batch_size,
    )
    _write_vectors(output, rows, vectors)
    print(f"{output}: {vectors.shape[0]} embeddings of {vectors.shape[1]} dimensions.")


@app.command()
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
    loaded = _load(model, dtype)
    decoded = loaded.decode(texts, prompt_name=_instruction(prompt_name), max_new_tokens=max_new_tokens)
    table = Table("text", "decoded from its embedding", show_lines=True)
    for text, said in zip(texts, decoded, strict=True):
        table.add_row(_plain(text), _plain(said))
    Console().print(table)


@app.command()
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
) -> None:
    r"""Let an LLM respond to queries, resumably: the same command again goes on where it stopped.

    Example:
        llm2vec-gen respond queries.txt --output responses --max-new-tokens 96 \
            --model HuggingFaceTB/SmolLM2-135M-Instruct
    """
    if not queries.is_file():
        raise FileNotFoundError(f"{queries}: there is no such file of queries.")
    from llm2vec_gen_st.backbone import load_backbone
    from llm2vec_gen_st.responses import write_responses

    folder = write_responses(
        queries,
        output,
        load_backbone(model, model_kwargs=_model_kwargs(dtype)),
        batch_size=batch_size,
        shard=shard,
        part_format=part_format.value,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        system=system,
    )
    print(f"{folder}: responses written.")


@app.command()
def train(
    responses: Annotated[
        Path, typer.Argument(help="Folder written by `respond`, or a .jsonl or .parquet file.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the student.")],
    base: Annotated[str | None, typer.Option(help="The frozen LLM: hub id or directory.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="'self', or the name or directory of a SentenceTransformer.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe; chosen by the base if not given.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a field of the recipe: key=value. Repeatable.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Go on from a saved student instead of an untrained one.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Accept responses that are not all written yet.")] = False,
) -> None:
    r"""Train a student on queries and responses; the same command again goes on where it stopped.

    Example:
        llm2vec-gen train responses --output student --teacher all-MiniLM-L6-v2 \
            --base HuggingFaceTB/SmolLM2-135M-Instruct --set epochs=2
    """
    if not responses.exists():
        raise FileNotFoundError(f"{responses}: there are no responses; write them with `llm2vec-gen respond`.")
    overrides = _overrides(settings or [])
    from llm2vec_gen_st.training import Recipe
    from llm2vec_gen_st.training import train as train_student

    known = {field.name for field in fields(Recipe)}
    if unknown := sorted(overrides.keys() - known):
        raise ValueError(f"--set: no recipe has the fields {unknown}; known are {sorted(known)}.")
    options: dict[str, Any] = {"base": base, "teacher": teacher, "recipe": recipe, "start": start}
    options = {key: value for key, value in options.items() if value is not None}
    options.update(overrides, partial=partial)
    train_student(responses, output, **options)
    print(f"{output}: student saved; load it with LLM2VecGen({str(output)!r}).")


@app.command()
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
    loaded = _load(model, dtype)
    if to is Form.ours:
        loaded.save_pretrained(str(output))
    else:
        from llm2vec_gen_st import checkpoints

        (checkpoints.export_official if to is Form.official else checkpoints.export_native)(loaded, output)
    print(f"{output}: written ({to.value} form).")


@app.command()
def info(model: Model, dtype: DtypeOption = Dtype.auto) -> None:
    """Show a model's base, fingerprint, sizes, instructions, suffix and parameter counts.

    Example:
        llm2vec-gen info llm2vec-gen-smollm2-135m
    """
    loaded = _load(model, dtype)
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
    ):
        table.add_row(key, _plain(value))
    Console().print(table)


def _model_kwargs(dtype: Dtype) -> dict[str, Any]:
    return {} if dtype is Dtype.auto else {"dtype": dtype.value}


def _load(model: str, dtype: Dtype) -> LLM2VecGen:
    from transformers.utils import logging

    from llm2vec_gen_st.model import LLM2VecGen

    logging.disable_progress_bar()
    return LLM2VecGen(model, model_kwargs=_model_kwargs(dtype))


def _plain(text: str) -> Any:
    """Text that rich shows as it is, square brackets included."""
    from rich.text import Text

    return Text(text.strip())


def _instruction(name: str) -> str | None:
    return None if name == "none" else name


def _overrides(settings: Sequence[str]) -> dict[str, str]:
    """Recipe fields from ``key=value``.

    Example:
        >>> _overrides(["epochs=2", "suffix_text=a=b"])
        {'epochs': '2', 'suffix_text': 'a=b'}
    """
    found: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals):
            raise ValueError(f"--set {setting!r} is not of the form key=value.")
        found[key] = value
    return found


def _input_rows(texts: Sequence[str] | None, path: Path | None, column: str | None) -> list[dict[str, Any]]:
    """Rows with the key ``text``, from the command line or from a file; other columns are kept.

    Example:
        >>> _input_rows(["a"], None, None)
        [{'text': 'a'}]
    """
    if bool(texts) == (path is not None):
        raise ValueError("Give either texts or --input FILE.")
    if path is None:
        return [{"text": text} for text in texts or ()]
    from llm2vec_gen_st.files import read_rows

    rows: list[dict[str, Any]] = []
    for number, row in enumerate(read_rows(path)):
        name = column or next((known for known in TEXT_COLUMNS if known in row), None)
        if name is None or not isinstance(row.get(name), str):
            raise ValueError(
                f"{path}, row {number} has no text in the column {name!r}."
                if name
                else f"{path}, row {number} has none of the columns {', '.join(TEXT_COLUMNS)}; name one with --column."
            )
        others = {key: value for key, value in row.items() if key not in (name, "text", "embedding")}
        rows.append({**others, "text": row[name]})
    return rows


def _write_vectors(path: Path, rows: Sequence[dict[str, Any]], vectors: np.ndarray) -> None:
    from llm2vec_gen_st.files import write_atomically, write_rows

    if path.suffix != ".npy":
        write_rows(path, [{**row, "embedding": vector.tolist()} for row, vector in zip(rows, vectors, strict=True)])
        return
    import numpy as np

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as handle:
            np.save(handle, vectors)

    write_atomically(path, write)


if __name__ == "__main__":
    app()
