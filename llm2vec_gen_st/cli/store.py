"""Commands on a store of documents: index files, search, and answer questions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llm2vec_gen_st.cli.options import BatchSize, Dtype, load_model, plain
from llm2vec_gen_st.extras import require

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_llm2vec_gen import FaissStore, LLM2VecGenEmbeddings

    from llm2vec_gen_st.model import LLM2VecGen

# What a store remembers of the model that made it, by these names in its settings.
MODEL_SETTING, DTYPE_SETTING = "model", "dtype"
_SHOWN_CHARACTERS = 400


class Metric(str, Enum):
    """How vectors are compared."""

    cosine = "cosine"
    ip = "ip"
    l2 = "l2"


StorePath = Annotated[Path, typer.Argument(help="A store written by `index`.", show_default=False)]
StoreModel = Annotated[str | None, typer.Option(help="The model; the one the store was made with if not given.")]
Filter = Annotated[
    str | None, typer.Option("--filter", help="Only documents whose metadata match, as JSON: '{\"year\": 2021}'.")
]


def index(
    paths: Annotated[
        list[Path], typer.Argument(help="Files (txt, md, jsonl, csv, parquet) and folders.", show_default=False)
    ],
    store: Annotated[Path, typer.Option("--store", "-s", help="The store's file; made if it is not there.")],
    model: Annotated[
        str | None, typer.Option(help="The model; the store's own, or the built-in one for a new store, if not given.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of the text in jsonl, csv and parquet files.")] = None,
    chunk_size: Annotated[int, typer.Option(min=1, help="Longest chunk, in characters.")] = 1200,
    chunk_overlap: Annotated[int, typer.Option(min=0, help="Characters that neighbouring chunks may share.")] = 150,
    metric: Annotated[
        Metric | None, typer.Option(help="Comparison of vectors; cosine for a new store if not given.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--index",
            help="flat (exact), hnsw, ivf, ivfpq, or a FAISS factory string; flat for a new store if not given.",
        ),
    ] = None,
    batch_size: BatchSize = 64,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Number format of the base model's weights; the store's own if not given.")
    ] = None,
) -> None:
    """Bring a store up to date with files: only what is new or changed is embedded.

    Example:
        llm2vec-gen index notes articles.jsonl --store corpus.store --chunk-size 800
    """
    _require_langchain()
    from langchain_llm2vec_gen import FaissStore
    from langchain_llm2vec_gen.ingest import find_files, index_files

    find_files(paths)  # A wrong path is told before the model is loaded.
    remembered = _settings(store) if store.exists() else {}
    if model is None and store.exists():
        model = _remembered_model(store, remembered)
    if model is None:
        from llm2vec_gen_st.demo.run import MODEL

        model = MODEL
    dtype = dtype or Dtype(remembered.get(DTYPE_SETTING, Dtype.auto.value))
    embeddings = _embeddings(load_model(model, dtype), batch_size)
    with FaissStore(store, embeddings, metric=None if metric is None else metric.value, index=kind) as opened:
        opened.settings[MODEL_SETTING] = str(Path(model).resolve()) if Path(model).is_dir() else model
        opened.settings[DTYPE_SETTING] = dtype.value
        report = index_files(
            opened,
            paths,
            column=column,
            chunk_size=chunk_size,
            chunk_overlap=chunk_overlap,
            batch_size=batch_size,
            progress=sys.stderr.isatty(),
        )
        total = len(opened)
    print(
        f"{store}: {report.added} chunks added, {report.unchanged} unchanged, {report.removed} removed, from "
        f"{report.files} files; {total} in all."
    )
    if report.skipped:
        kinds = ", ".join(f"{count} {ending or 'without ending'}" for ending, count in report.skipped.items())
        print(f"Files of other kinds, left out: {kinds}.")


def search(
    store: StorePath,
    query: Annotated[str, typer.Argument(help="What to search for.", show_default=False)],
    k: Annotated[int, typer.Option("-k", min=1, help="Documents to find.")] = 5,
    filter: Filter = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
    model: StoreModel = None,
) -> None:
    """Find the chunks nearest to a query.

    Example:
        llm2vec-gen search corpus.store 'where do polar bears live?' -k 3
    """
    condition = _parsed(filter)
    with opened_store(store, model) as (opened, _):
        found = opened.similarity_search_with_score(query, k=k, filter=condition)
    if as_json:
        rows = [
            {"id": document.id, "score": score, "text": document.page_content, "metadata": document.metadata}
            for document, score in found
        ]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    table = Table("score", "source", "text", show_lines=True)
    for document, score in found:
        table.add_row(f"{score:.3f}", plain(_source(document)), plain(_excerpt(document)))
    Console().print(table)


def ask(
    store: StorePath,
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    k: Annotated[int, typer.Option("-k", min=1, help="Passages to give to the LLM.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    filter: Filter = None,
    model: StoreModel = None,
) -> None:
    """Answer a question from a store's passages, with the same LLM that embedded them.

    Example:
        llm2vec-gen ask corpus.store 'where do polar bears live?' --max-tokens 64
    """
    condition = _parsed(filter)
    with opened_store(store, model) as (opened, loaded):
        from langchain_llm2vec_gen import ChatLLM2VecGen
        from langchain_llm2vec_gen.rag import answer_chain

        retriever = opened.as_retriever(search_kwargs={"k": k, "filter": condition})
        passages: list[Document] = []
        for part in answer_chain(retriever, ChatLLM2VecGen(loaded, max_tokens=max_tokens)).stream(question):
            passages += part.get("passages", [])
            print(part.get("answer", ""), end="", flush=True)
    print("\n")
    table = Table("passage", "source", "text", show_lines=True)
    for number, document in enumerate(passages, 1):
        table.add_row(f"[{number}]", plain(_source(document)), plain(_excerpt(document)))
    Console().print(table)


def _require_langchain() -> None:
    for package in ("langchain_core", "faiss"):
        require(package, extra="langchain", why="a store of documents")


@contextmanager
def opened_store(path: Path, model: str | None) -> Iterator[tuple[FaissStore, LLM2VecGen]]:
    """A store to read, with the model that made it, or the one named.

    Args:
        path: The store.
        model: The model; the store's own if not given.
    """
    _require_langchain()
    from langchain_llm2vec_gen import FaissStore

    settings = _settings(path)
    name = model or _remembered_model(path, settings)
    loaded = load_model(name, Dtype(settings.get(DTYPE_SETTING, Dtype.auto.value)))
    with FaissStore(path, _embeddings(loaded), read_only=True) as store:
        yield store, loaded


def _settings(path: Path) -> dict[str, str]:
    """What a store remembers, without opening its index."""
    from langchain_llm2vec_gen import FaissStore

    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such store; make one with `llm2vec-gen index`.")
    return FaissStore.stored_settings(path)


def _remembered_model(path: Path, settings: dict[str, str]) -> str:
    if MODEL_SETTING not in settings:
        raise ValueError(f"{path} does not say which model made it; name the model with --model.")
    return settings[MODEL_SETTING]


def _embeddings(model: LLM2VecGen, batch_size: int = 1) -> LLM2VecGenEmbeddings:
    from langchain_llm2vec_gen import LLM2VecGenEmbeddings

    return LLM2VecGenEmbeddings(model, batch_size=batch_size)


def _parsed(text: str | None) -> dict[str, Any] | None:
    """A filter from its JSON.

    Example:
        >>> _parsed('{"year": {"$gte": 2020}}')
        {'year': {'$gte': 2020}}
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--filter {text!r} is not valid JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"--filter {text!r} is not a JSON object such as '{{\"year\": 2021}}'.")
    return found


def _source(document: Document) -> str:
    source = str(document.metadata.get("source", document.id))
    return f"{source}, row {document.metadata['row']}" if "row" in document.metadata else source


def _excerpt(document: Document) -> str:
    text = " ".join(document.page_content.split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
