"""The application: its commands, and the options that come before them."""

from __future__ import annotations

from typing import Annotated

import typer

from llm2vec_gen_st import __version__
from llm2vec_gen_st.cli import corpus, evaluation, explain, grid, lens, page, store, student, training
from llm2vec_gen_st.cli.errors import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="LLM2Vec-Gen: embed what the LLM would answer, and read the embeddings back as text.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__, flush=True)
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show full tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """LLM2Vec-Gen: embed what the LLM would answer, and read the embeddings back as text."""


for command in (
    student.demo,
    student.encode,
    corpus.encode_corpus,
    student.decode,
    explain.explain,
    training.respond,
    training.train,
    grid.grid,
    student.convert,
    student.info,
    store.index,
    store.search,
    store.ask,
    evaluation.evaluate,
):
    app.command()(command)

# Named here: a function called map would hide Python's own, and one called app the application.
app.command("map")(explain.map_texts)
app.command("app")(page.page)
app.add_typer(lens.latent_lens, name="latent-lens")
