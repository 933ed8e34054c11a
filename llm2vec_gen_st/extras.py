"""Optional dependencies: imported when needed, and named with their install command when missing."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message holds the command that installs it."""


def require(module: str, *, extra: str, why: str) -> Any:
    """Import an optional dependency.

    Args:
        module: Dotted module name.
        extra: The extra of this package that installs it.
        why: What needs it, as a noun phrase.

    Returns:
        The module.

    Raises:
        MissingExtraError: If it is not installed.

    Example:
        >>> require("json", extra="train", why="reading").loads("1")
        1
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f"{why[:1].upper()}{why[1:]} needs the package {module.partition('.')[0]!r}, which is not installed. "
            f"Install it with: pip install 'llm2vec-gen-st[{extra}]'",
            name=module,
        ) from error
