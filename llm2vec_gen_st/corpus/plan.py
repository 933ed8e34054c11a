"""Where each part of a corpus begins and ends: found in one pass over its files, and kept beside the parts."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from llm2vec_gen_st.corpus.reading import Columns, Passage, Passages, Row, as_passage, corpus_files, read_file
from llm2vec_gen_st.manifests import read_manifest, refuse_difference
from llm2vec_gen_st.parts import PartFolder

MANIFEST = "corpus.json"
HOLDS = "embeddings"


@dataclass(frozen=True)
class Slice:
    """The passages of one part: neighbours in one file.

    Args:
        file: Number of the file.
        start: Where the first one begins.
        rows: How many there are.
        digest: Of their ids, texts and kept columns.
    """

    file: int
    start: int
    rows: int
    digest: str

    def __str__(self) -> str:
        return f"{self.file} {self.start} {self.rows} {self.digest}"

    @classmethod
    def parse(cls, text: str) -> Slice:
        """The slice that a line of the manifest names.

        Example:
            >>> Slice.parse("0 4096 512 c0ffee")
            Slice(file=0, start=4096, rows=512, digest='c0ffee')
        """
        file, start, rows, digest = text.split()
        return cls(int(file), int(start), int(rows), digest)


@dataclass(frozen=True)
class CorpusPlan:
    """A corpus cut into parts.

    Args:
        files: Its files.
        columns: What is read of them.
        slices: The passages of each part.
    """

    files: list[Path]
    columns: Columns
    slices: list[Slice]

    @property
    def rows(self) -> int:
        """Number of passages."""
        return sum(piece.rows for piece in self.slices)

    def passages(self, reader: Passages, number: int) -> list[Passage]:
        """The passages of a part.

        Args:
            reader: Reads this plan's files.
            number: The part.

        Raises:
            ValueError: If they are not those that were there when the plan was made.
        """
        piece = self.slices[number]
        found = reader.read(piece.file, piece.start, piece.rows)
        if _digest(found) != piece.digest:
            raise ValueError(
                f"{self.files[piece.file]}: the file is not what it was when the folder was begun (the {piece.rows} "
                f"passages of part {number} differ). Put the old file back, or encode the new one into another folder."
            )
        return found


def plan_corpus(
    corpus: str | Path | Iterable[str | Path],
    output_dir: str | Path,
    *,
    rows_per_part: int = 8192,
    id_column: str = "id",
    text_column: str | None = None,
    keep: Iterable[str] = (),
    progress: bool = True,
) -> CorpusPlan:
    """Cut a corpus into parts, or read how it was cut before.

    One pass over the files, in bounded memory; ids are compared in a temporary database on disk. The plan is kept in
    ``corpus.json``.

    Args:
        corpus: See :func:`~llm2vec_gen_st.corpus.encode_corpus`.
        output_dir: Folder of the parts.
        rows_per_part: Passages of a part; the last part of a file has fewer.
        id_column: Column of the ids.
        text_column: Column of the texts.
        keep: Columns to keep.
        progress: Whether a progress bar is shown.

    Returns:
        The plan.

    Raises:
        ValueError: If a row has no id or text, an id comes twice, or the folder is the corpus's own, or was begun with
            another corpus or other settings.
    """
    if rows_per_part < 1:
        raise ValueError(f"rows_per_part must be at least 1, got {rows_per_part}.")
    given = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    if Path(output_dir).resolve() in (Path(path).resolve() for path in given):
        raise ValueError(
            f"{output_dir} is the corpus's own folder, whose files are all read as passages; choose another folder for "
            "the embeddings."
        )
    files = corpus_files(given)
    columns = Columns(id_column, text_column, tuple(keep))
    folder = Path(output_dir)
    asked: dict[str, Any] = {
        # Without their folder: machines may have it elsewhere.
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in files],
        "rows_per_part": rows_per_part,
        "id_column": id_column,
        "text_column": text_column,
        "keep": list(columns.keep),
    }
    path = folder / MANIFEST
    if path.exists():
        found = read_manifest(path)
        refuse_difference(folder, HOLDS, found, asked)
        return CorpusPlan(files, columns, [Slice.parse(line) for line in found["slices"]])
    plan = CorpusPlan(files, columns, list(_slices(files, columns, rows_per_part, progress)))
    if not plan.slices:
        raise ValueError(f"{', '.join(map(str, files))}: there are no passages.")
    told = {**asked, "rows": plan.rows, "parts": len(plan.slices), "slices": [str(piece) for piece in plan.slices]}
    PartFolder(folder, HOLDS).claim(MANIFEST, told)
    return plan


def _slices(files: list[Path], columns: Columns, rows_per_part: int, progress: bool) -> Iterator[Slice]:
    with closing(_Ids(files)) as ids, tqdm(desc="reading", unit="passage", disable=not progress) as bar:
        for file, path in enumerate(files):
            rows = read_file(path, columns)
            while block := list(islice(rows, rows_per_part)):
                passages = [as_passage(path, row, columns) for row in block]
                ids.add(file, block, passages)
                bar.update(len(block))
                yield Slice(file, block[0].start, len(block), _digest(passages))
        ids.refuse_repeated()


class _Ids:
    """All ids of a corpus, in a temporary database that SQLite keeps on disk and sorts in bounded memory."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._connection = sqlite3.connect("", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = OFF")
        self._connection.execute("CREATE TABLE ids (id TEXT NOT NULL, file INTEGER NOT NULL, place INTEGER NOT NULL)")

    def add(self, file: int, rows: list[Row], passages: list[Passage]) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany(
            "INSERT INTO ids VALUES (?, ?, ?)",
            ((passage.id, file, row.place) for row, passage in zip(rows, passages, strict=True)),
        )
        self._connection.execute("COMMIT")

    def refuse_repeated(self) -> None:
        repeated = self._connection.execute("SELECT id FROM ids GROUP BY id HAVING count(*) > 1").fetchone()
        if repeated is None:
            return
        places = self._connection.execute(
            "SELECT file, place FROM ids WHERE id = ? ORDER BY file, place LIMIT 2", repeated
        )
        first, second = (
            f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {place}"
            for path, place in ((self._files[file], place) for file, place in places)
        )
        raise ValueError(f"The id {repeated[0]!r} comes twice: {first}, and {second}. Ids must differ.")

    def close(self) -> None:
        self._connection.close()


def _digest(passages: list[Passage]) -> str:
    rows = [[passage.id, passage.text, passage.metadata] for passage in passages]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]
