"""Cutting texts into chunks, and the ids by which an unchanged chunk is known again."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_llm2vec_gen.ingest.files import ending
from langchain_llm2vec_gen.ingest.records import Record
from llm2vec_gen_st.extras import require

if TYPE_CHECKING:
    from langchain_text_splitters import RecursiveCharacterTextSplitter


@dataclass(frozen=True)
class Chunk:
    """A piece of a source, as the store keeps it.

    Args:
        id: Says file and text, and which of equal texts in this source it is.
        text: The piece.
        metadata: ``source`` (the path that led to the file), ``row`` for files of rows, ``chunk`` (its number within
            the text, from 0), ``start`` (where its first character stands in the text; where text repeats itself within
            the overlap, one such place), and the row's columns.
    """

    id: str
    text: str
    metadata: dict[str, Any]


class Chunker:
    """Cuts the texts of a source.

    Args:
        chunk_size: Longest chunk, in characters.
        chunk_overlap: Characters that neighbouring chunks may share.

    Raises:
        ValueError: If the sizes do not fit together.
        MissingExtraError: If langchain-text-splitters is not installed.
    """

    def __init__(self, *, chunk_size: int, chunk_overlap: int) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; a chunk has at least 1 character.")
        if not 0 <= chunk_overlap < chunk_size:
            raise ValueError(
                f"chunk_overlap is {chunk_overlap}; it must be at least 0 and below chunk_size {chunk_size}."
            )
        splitters = require("langchain_text_splitters", extra="langchain", why="cutting files into chunks")
        options = {"chunk_size": chunk_size, "chunk_overlap": chunk_overlap, "add_start_index": True}
        recursive = splitters.RecursiveCharacterTextSplitter
        self._prose: RecursiveCharacterTextSplitter = recursive(**options)
        self._markdown: RecursiveCharacterTextSplitter = recursive.from_language(splitters.Language.MARKDOWN, **options)

    def chunks(self, path: Path, records: Iterable[Record]) -> Iterator[tuple[Chunk, int]]:
        """Chunks of one source, in order, each with the bytes of the file that are read by then.

        Args:
            path: The source; its ending chooses between prose and Markdown.
            records: Its texts.

        Yields:
            Chunk and position.
        """
        splitter = self._markdown if ending(path) == ".md" else self._prose
        key_of_source = source_key(path)
        seen: Counter[str] = Counter()
        for record in records:
            row = {} if record.row is None else {"row": record.row}
            for number, piece in enumerate(splitter.create_documents([record.text])):
                text = piece.page_content
                key = f"{key_of_source}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
                seen[key] += 1
                own = {"source": str(path), **row, "chunk": number, "start": piece.metadata["start_index"]}
                yield Chunk(f"{key}-{seen[key]}", text, {**record.metadata, **own}), record.position


def source_key(path: Path) -> str:
    """What the ids of all chunks of a file start with (before the first hyphen).

    It is the file's own, however its path is spelled and wherever a relative path starts from: `notes.md` of one folder
    must not replace that of another.

    Args:
        path: The file.

    Example:
        >>> source_key(Path("notes.md")) == source_key(Path("docs/../notes.md"))
        True
    """
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
