"""Folders of numbered parts: each part is written whole, and a manifest refuses what would be made differently."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm2vec_gen_st.files import count_rows, read_rows
from llm2vec_gen_st.manifests import claim

logger = logging.getLogger(__name__)

_AGAIN = "run the same command again; it writes only what is missing"


@dataclass(frozen=True)
class PartFolder:
    """A folder that several processes fill with parts, side by side or one after the other.

    Whether a part is there is told by the part itself, never by a time: it appears in one step when it is complete.

    Args:
        folder: The folder.
        holds: What its parts hold, in one word, for messages.
        part_format: Ending of the parts' names.

    Example:
        >>> PartFolder(Path("out"), "responses").path(7).as_posix()
        'out/part-000007.parquet'
    """

    folder: Path
    holds: str
    part_format: str = "parquet"

    def path(self, number: int) -> Path:
        """File of a part."""
        return self.folder / f"part-{number:06d}.{self.part_format}"

    def claim(self, name: str, manifest: Mapping[str, Any], *, unsaid: Mapping[str, Any] | None = None) -> None:
        """Say how the parts are made, or agree with what was said before.

        Args:
            name: File name of the manifest.
            manifest: What JSON can hold.
            unsaid: Values that are meant where an older manifest does not have them.

        Raises:
            ValueError: If the folder's parts were made differently; names what differs.
        """
        claim(self.folder / name, manifest, holds=self.holds, unsaid=unsaid)

    def is_finished(self, number: int, rows: int) -> bool:
        """Whether a part is there, whole, and has its rows; of a damaged one a warning says that it counts as missing.

        Args:
            number: The part.
            rows: Its number of rows.
        """
        path = self.path(number)
        wrong = _what_is_wrong(path, rows) if path.exists() else None
        if wrong:
            logger.warning("%s The part is written anew.", wrong)
        return path.exists() and not wrong

    def finished(self, rows: Sequence[int], *, partial: bool = False) -> list[Path]:
        """Files of all parts, each checked to be there and to have its rows.

        Args:
            rows: Number of rows of each part.
            partial: Whether missing parts are accepted.

        Raises:
            ValueError: If parts are missing (says how many, and the first) or damaged (names the first).
        """
        paths = [self.path(number) for number in range(len(rows))]
        missing = [path.name for path in paths if not path.exists()]
        if missing and not partial:
            raise ValueError(
                f"{self.folder}: {len(missing)} of {len(paths)} parts are missing, the first is {missing[0]}. To write "
                f"them, {_AGAIN}."
            )
        for path, count in zip(paths, rows, strict=True):
            if path.exists() and (wrong := _what_is_wrong(path, count)):
                raise ValueError(f"{wrong} Delete the file and {_AGAIN}.")
        return [path for path in paths if path.exists()]


def _what_is_wrong(path: Path, rows: int) -> str | None:
    try:
        found = count_rows(path)
    except ValueError as error:
        return str(error)
    return None if found == rows else f"{path}: it has {found} rows where {rows} were written."


def read_part(path: Path) -> list[dict[str, Any]]:
    """Rows of one part, all of its checksums verified.

    Raises:
        ValueError: If it is damaged; names it and says what to do.
    """
    try:
        return read_rows(path)
    except ValueError as error:
        raise ValueError(f"{error} Delete the file and {_AGAIN}.") from error


def parse_shard(shard: str) -> tuple[int, int]:
    """Number of a shard and number of all shards, of ``i/N``.

    Raises:
        ValueError: If it is not of that form, with 0 <= i < N.

    Example:
        >>> parse_shard("3/8")
        (3, 8)
    """
    index, _, count = shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"shard {shard!r} is not of the form i/N with 0 <= i < N.")
    return int(index), int(count)


def run_of_parts(parts: int, shard: str) -> range:
    """The shard's share of numbered parts: a run of neighbours, so that it reads its input in one go.

    Args:
        parts: Number of parts.
        shard: ``i/N``.

    Example:
        >>> [list(run_of_parts(5, f"{index}/3")) for index in range(3)]
        [[0], [1, 2], [3, 4]]
    """
    index, count = parse_shard(shard)
    return range(parts * index // count, parts * (index + 1) // count)
