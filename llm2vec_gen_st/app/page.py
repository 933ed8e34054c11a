"""The page: two text boxes and what is found, served by gradio on this machine, with nothing loaded from elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from llm2vec_gen_st.app.markup import STYLE, error_markup, head_markup, readings_markup, status_markup
from llm2vec_gen_st.app.reading import QueryReader
from llm2vec_gen_st.extras import require

if TYPE_CHECKING:
    import gradio

_log = logging.getLogger(__name__)

# Tells the browser to load from this server alone, whatever a version of gradio may name in its page.
_ONLY_FROM_HERE = b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
_SYSTEM_FONTS = ("system-ui", "sans-serif")


def updates(reader: QueryReader, first: str, second: str) -> Iterator[tuple[str, str | None]]:
    """What the page shows, step by step: status and readings, both as markup.

    Args:
        reader: Computes what is shown.
        first: Text of the first box.
        second: Text of the second one; either may be empty.

    Yields:
        Markup of the status, and of the readings; ``None`` leaves those that are there. Whatever goes wrong is the
        last status, in words.
    """
    texts = [text for text in (first, second) if text.strip()]
    try:
        for step in reader.steps(texts or [""]):
            yield status_markup(step), readings_markup(step, reader.store.metric)
    except Exception as error:
        # The page is all that its reader sees; the terminal has the traceback of what is not the reader's doing.
        if not isinstance(error, ValueError):
            _log.exception("A query could not be read.")
        yield error_markup(str(error) or type(error).__name__), None


def build_page(reader: QueryReader) -> gradio.Blocks:
    """The page of a reader, not served yet.

    Args:
        reader: Computes what is shown.

    Raises:
        MissingExtraError: If gradio is not installed.
    """
    gr = import_gradio()

    def read(first: str, second: str) -> Iterator[tuple[str, Any]]:
        for status, found in updates(reader, first, second):
            yield status, gr.skip() if found is None else found

    with gr.Blocks(title="What an embedding holds", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(head_markup(_about(reader)), apply_default_css=False)
        with gr.Row(equal_height=True):
            first = gr.Textbox(label="Query", placeholder="Why is the sky blue?", max_lines=4, autofocus=True, scale=4)
            second = gr.Textbox(
                label="Second query, to compare (optional)", placeholder="What makes a rainbow?", max_lines=4, scale=4
            )
            button = gr.Button("Embed", variant="primary", scale=0, min_width=120)
        status = gr.HTML(apply_default_css=False)
        found = gr.HTML(apply_default_css=False)
        gr.on(
            [button.click, first.submit, second.submit],
            read,
            inputs=[first, second],
            outputs=[status, found],
            show_progress="minimal",
            show_progress_on=status,
        )
    return page


def serve(reader: QueryReader, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False) -> None:
    """Serve the page until Ctrl-C.

    Args:
        reader: Computes what is shown.
        host: Address to listen on; ``0.0.0.0`` for all of this machine's.
        port: Port; the first free one from 7860 if not given.
        share: Whether gradio makes a public link too, through its makers' servers.

    Raises:
        MissingExtraError: If gradio is not installed.
        OSError: If the port is taken.
    """
    gr = import_gradio()
    middleware = require("starlette.middleware", extra="app", why="the page in the browser").Middleware
    page = build_page(reader)
    try:
        _, url, public = page.launch(
            server_name=host,
            server_port=port,
            share=share,
            inbrowser=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            footer_links=[],
            theme=gr.themes.Default(font=_SYSTEM_FONTS, font_mono=("ui-monospace", "monospace")),
            css=STYLE,
            app_kwargs={"middleware": [middleware(_OnlyFromHere)]},
        )
    except OSError as error:
        raise OSError(
            f"The page cannot be served on {host}, port {port or '7860 to 7959'}: the port is taken, or the address is "
            "not this machine's. Choose another --port or --host."
        ) from error
    print(f"{public or url}: open it in a browser; Ctrl-C ends it.", flush=True)
    page.block_thread()


def import_gradio() -> Any:
    """Gradio, told to send no statistics and to keep no record of queries.

    Raises:
        MissingExtraError: If it is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_RUN_HISTORY"] = "False"
    return require("gradio", extra="app", why="the page in the browser")


_Message = MutableMapping[str, Any]


class _OnlyFromHere:
    """ASGI middleware that puts :data:`_ONLY_FROM_HERE` on every answer."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(
        self, scope: _Message, receive: Callable[..., Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        async def send_with_policy(message: _Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", _ONLY_FROM_HERE)]
            await send(message)

        await self._app(scope, receive, send_with_policy)


def _about(reader: QueryReader) -> str:
    transformer = reader.model.suffix_transformer
    return (
        f"{transformer.base.id}, frozen, with {transformer.thought_tokens} thought and "
        f"{transformer.compression_tokens} compression tokens; embeddings of "
        f"{reader.model.get_embedding_dimension()} dimensions; {len(reader.store)} passages"
    )
