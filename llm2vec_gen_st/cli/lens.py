"""Commands on latent lenses: indexes of a corpus's token states, which ``explain --lens`` looks through."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llm2vec_gen_st.cli.explain import OtherModel, model_name
from llm2vec_gen_st.cli.options import BatchSize, Dtype, DtypeOption, load_model

latent_lens = typer.Typer(no_args_is_help=True, help="Make the index that `explain --lens` looks through.")


@latent_lens.command()
def build(
    source: Annotated[
        Path,
        typer.Argument(help="A folder of responses, or a .txt, .jsonl or .parquet file of texts.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the index; must not be there yet.")],
    model: OtherModel = None,
    column: Annotated[
        str | None, typer.Option(help="Column of the text in a file; text, query or passage if not given.")
    ] = None,
    layer: Annotated[
        int, typer.Option(help="Whose states: 0 for the input embeddings, 1 for the first layer's, -1 for the last's.")
    ] = -1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens kept in all.")] = 200_000,
    batch_size: BatchSize = 32,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Index the states that the plain LLM has at the tokens of a corpus, each with its sentence.

    Example:
        llm2vec-gen latent-lens build responses --output lens --max-tokens 50000
    """
    texts = _corpus(source, column)
    from llm2vec_gen_st.interpret import build_latent_lens

    loaded = load_model(model_name(model), dtype)
    lens = build_latent_lens(
        loaded,
        texts,
        output,
        layer=layer,
        max_tokens=max_tokens,
        batch_size=batch_size,
        progress=sys.stderr.isatty(),
    )
    print(f"{output}: {len(lens)} token states of layer {lens.layer}; look through it with `explain --lens {output}`.")


def _corpus(source: Path, column: str | None) -> list[str]:
    """Texts of a folder of responses or of a file."""
    if source.is_dir():
        if column is not None:
            raise ValueError(f"{source} is a folder of responses, which has no column to choose; leave out --column.")
        from llm2vec_gen_st.responses import read_responses

        # A response that was cut off is as good a context as any other.
        return list(read_responses(source, include=("ok", "cut_off"))["response"])
    from llm2vec_gen_st.cli.rows import input_rows

    return [row["text"] for row in input_rows(None, source, column)]
