"""Command that opens a page in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llm2vec_gen_st.cli.options import Dtype, load_model


def page(
    model: Annotated[
        str | None, typer.Option(help="The model; the store's own, or the built-in one without a store, if not given.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", "-s", help="A store written by `index`; the demonstration's passages if not given."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; the first free one from 7860 if not given.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Make a public link too: everything then goes through gradio's servers.")
    ] = False,
) -> None:
    """Open a page in the browser that shows what one or two queries' embeddings hold.

    Example:
        llm2vec-gen app --store corpus.store --port 8000
    """
    from llm2vec_gen_st.app import QueryReader, passages_store
    from llm2vec_gen_st.app.page import import_gradio, serve

    import_gradio()
    if store is not None:
        from llm2vec_gen_st.cli.store import opened_store

        with opened_store(store, model) as (opened, loaded):
            serve(QueryReader(loaded, opened), host=host, port=port, share=share)
        return
    from llm2vec_gen_st.demo.run import MODEL, load_passages

    loaded = load_model(model or MODEL, Dtype.auto)
    passages = load_passages()
    print(f"Encoding the demonstration's {len(passages)} passages ...", flush=True)
    with passages_store(loaded, passages) as opened:
        serve(QueryReader(loaded, opened), host=host, port=port, share=share)
