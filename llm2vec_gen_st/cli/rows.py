"""Texts that a command reads, and embeddings that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm2vec_gen_st.files import TEXT_COLUMNS

if TYPE_CHECKING:
    import numpy as np


def input_rows(texts: Sequence[str] | None, path: Path | None, column: str | None) -> list[dict[str, Any]]:
    """Rows with the key ``text``, from the command line or from a file; other columns are kept.

    Raises:
        ValueError: If neither or both are given, or a row has no text.

    Example:
        >>> input_rows(["a"], None, None)
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


def write_vectors(path: Path, rows: Sequence[dict[str, Any]], vectors: np.ndarray) -> None:
    """Write embeddings (N, D) as an array (``.npy``), or beside their rows in a column ``embedding``."""
    from llm2vec_gen_st.files import write_atomically, write_rows

    if path.suffix != ".npy":
        write_rows(path, [{**row, "embedding": vector.tolist()} for row, vector in zip(rows, vectors, strict=True)])
        return
    import numpy as np

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as handle:
            np.save(handle, vectors)

    write_atomically(path, write)
