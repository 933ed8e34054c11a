"""Which errors of a command become one sentence, and which keep their traceback."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from llm2vec_gen_st.extras import MissingExtraError


class Commands(TyperGroup):
    """Prints errors that the user can act on as one sentence, without a traceback.

    Everything else passes through: bugs with their traceback, and what typer itself ends a command with (an exit, a
    wrong option, Ctrl-C).
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            result = super().invoke(ctx)
            # A reader that has gone away (`| head`) is noticed here, where it is handled, and not at the exit.
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            raise  # an OSError, but nobody is left to read a sentence: typer ends quietly
        except known_errors() as error:
            if ctx.params.get("debug"):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            Console(stderr=True).print(f"Error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error


def known_errors() -> tuple[type[Exception], ...]:
    """Classes of errors whose message is written for the user.

    Example:
        >>> issubclass(FileNotFoundError, known_errors()), issubclass(KeyError, known_errors())
        (True, False)
    """
    # Looked up, not imported: it can only have been raised if its module is there.
    backbone = sys.modules.get("llm2vec_gen_st.backbone")
    return (
        ValueError,
        OSError,
        FloatingPointError,
        MissingExtraError,
        *([] if backbone is None else [backbone.BaseModelError]),
    )
