"""Responses on disk: one part a batch, each written whole, so that a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import read_rows, write_rows
from llm2vec_gen_st.manifests import read_manifest
from llm2vec_gen_st.parts import PartFolder, parse_shard, read_part
from llm2vec_gen_st.responses.backends import BackendName, ResponseBackend, as_backend
from llm2vec_gen_st.responses.generation import GenerationSettings, Response
from llm2vec_gen_st.text import without_lone_surrogates

if TYPE_CHECKING:
    from datasets import Dataset

MANIFEST = "responses.json"
# Folders that were begun when there was but one backend.
_UNSAID = {"backend": "transformers"}


@dataclass(frozen=True)
class ResponsePlan:
    """Queries dealt into batches, one a part, and how they are to be answered.

    Args:
        batches: Rows with ``id`` and ``query``, in the order of the parts.
        settings: How responses are written.
        part_format: File format of the parts.
        batch_size: Queries of a batch.
    """

    batches: list[list[dict[str, str]]]
    settings: GenerationSettings
    part_format: str
    batch_size: int

    def manifest(self) -> dict[str, Any]:
        """What is recorded beside the responses, without their writer."""
        rows = [row for batch in self.batches for row in batch]
        return {
            "queries_sha256": _digest(rows),
            "queries": len(rows),
            "batches": len(self.batches),
            "batch_size": self.batch_size,
            "part_format": self.part_format,
            "settings": asdict(self.settings),
        }

    def order(self) -> list[int]:
        """Numbers of the parts in the order in which they are written.

        Shuffled, so that a run stopped early holds short and long queries alike and its forecast of the time is fair.
        """
        return random.Random(0).sample(range(len(self.batches)), len(self.batches))


def plan_responses(
    queries: str | Path | Iterable[str | Mapping[str, Any]],
    *,
    batch_size: int = 64,
    part_format: Literal["parquet", "jsonl"] = "parquet",
    **settings: Any,
) -> ResponsePlan:
    """Sort queries by length and deal them into batches; see :func:`write_responses`.

    Raises:
        ValueError: If a row has no query, or ids repeat.

    Example:
        >>> [len(batch) for batch in plan_responses(["a", "b", "c"], batch_size=2).batches]
        [2, 1]
    """
    rows = _query_rows(queries)
    rows.sort(key=lambda row: (len(row["query"]), row["id"]))
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return ResponsePlan(batches, GenerationSettings(**settings), part_format, batch_size)


class ResponseWriter:
    """Writes parts of a folder of responses.

    Args:
        folder: The folder.
        manifest: :meth:`ResponsePlan.manifest`.
        settings: How responses are written.
        backend: The LLM.

    Raises:
        ValueError: If the folder holds responses made with other settings.
    """

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], settings: GenerationSettings, backend: ResponseBackend
    ) -> None:
        self.parts = PartFolder(folder, "responses", manifest["part_format"])
        self.parts.claim(MANIFEST, {**manifest, "backend": backend.name, "writer": backend.writer()}, unsaid=_UNSAID)
        self._settings = settings
        self._backend = backend

    def write(self, number: int, batch: list[dict[str, str]]) -> list[Response]:
        """Respond to one batch, and write its part."""
        responses = self._backend.respond([row["query"] for row in batch], self._settings, seed=number)
        write_rows(
            self.parts.path(number),
            [
                {**row, "response": response.text, "response_tokens": response.tokens, "flag": response.flag}
                for row, response in zip(batch, responses, strict=True)
            ],
        )
        return responses


def write_responses(
    queries: str | Path | Iterable[str | Mapping[str, Any]],
    output_dir: str | Path,
    writer: str | Backbone | ResponseBackend,
    *,
    backend: BackendName = "transformers",
    batch_size: int = 64,
    shard: str = "0/1",
    part_format: Literal["parquet", "jsonl"] = "parquet",
    progress: bool = True,
    **settings: Any,
) -> Path:
    """Let a frozen LLM respond to every query, resumably (paper, section 3: self-generated responses).

    Queries are sorted by length and dealt into fixed batches; each finished batch becomes one part file. The
    same call again skips the parts that are there, so a killed run ends with the rows of an unbroken one. A part that
    was damaged since is written anew.

    Args:
        queries: A ``.jsonl``, ``.jsonl.gz``, ``.parquet`` or ``.txt`` file, or an iterable of strings or of rows
            with the key ``query`` (and optionally ``id``).
        output_dir: Folder of the parts and of ``responses.json``, which records how they were made.
        writer: The LLM: a hub id, a directory, a loaded :class:`~llm2vec_gen_st.backbone.Backbone`, or a ready
            backend such as :class:`~llm2vec_gen_st.responses.VllmBackend`.
        backend: What runs an LLM given by name: ``transformers``, or ``vllm`` (its offline engine; the responses of a
            part are written side by side, so a ``batch_size`` of 1,000 and more serves it better).
        batch_size: Queries of one part, written at once.
        shard: ``i/N``: write every N-th batch, starting with batch i (0-based), into the same folder.
        part_format: File format of the parts.
        progress: Whether a progress bar with tokens/s is shown.
        **settings: Fields of :class:`~llm2vec_gen_st.responses.GenerationSettings`.

    Returns:
        The folder; read it with :func:`read_responses`.

    Raises:
        ValueError: If a row has no query, ids repeat, or the folder holds responses made with other settings.
        MissingExtraError: If the backend is not installed.
    """
    plan = plan_responses(queries, batch_size=batch_size, part_format=part_format, **settings)
    index, count = parse_shard(shard)
    folder = Path(output_dir)
    responder = ResponseWriter(folder, plan.manifest(), plan.settings, as_backend(writer, backend))
    batches = plan.batches
    mine = [number for number in plan.order() if number % count == index]
    todo = [number for number in mine if not responder.parts.is_finished(number, len(batches[number]))]
    flags: Counter[str] = Counter()
    tokens = 0
    with tqdm(
        total=sum(len(batches[number]) for number in mine),
        initial=sum(len(batches[number]) for number in mine if number not in set(todo)),
        desc="responses",
        unit="query",
        disable=not progress,
    ) as bar:
        for number in todo:
            responses = responder.write(number, batches[number])
            flags.update(response.flag for response in responses)
            tokens += sum(response.tokens for response in responses)
            bar.update(len(responses))
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix({"tokens/s": f"{tokens / elapsed:.0f}" if elapsed > 0 else "?", **flags})
    return folder


def read_responses(folder: str | Path, *, include: Iterable[str] = ("ok",), partial: bool = False) -> Dataset:
    """Read a folder of responses as a ``datasets.Dataset``.

    Args:
        folder: What :func:`write_responses` wrote.
        include: Flags of the rows to keep: ``ok``, ``cut_off``, ``empty``, ``non_finite``.
        partial: Whether missing parts are accepted.

    Returns:
        Dataset with the columns ``id``, ``query``, ``response``, ``response_tokens``, ``flag``, in the order of ids'
        batches.

    Raises:
        ValueError: If parts are missing (names how many and the first) or damaged (names the first), or no row is
            left.
    """
    datasets = require("datasets", extra="train", why="reading responses as a dataset")
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST)
    queries, batch_size = manifest["queries"], manifest["batch_size"]
    sizes = [min(batch_size, queries - start) for start in range(0, queries, batch_size)]
    wanted = set(include)
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for part in PartFolder(folder, "responses", manifest["part_format"]).finished(sizes, partial=partial):
        for row in read_part(part):
            if row["flag"] in wanted:
                rows.append(row)
            else:
                dropped[row["flag"]] += 1
    if not rows:
        raise ValueError(
            f"{folder}: no responses are left; skipped by their flags: {dict(dropped)}. Write longer responses "
            "(`--max-new-tokens`) or include flagged ones."
        )
    found: Dataset = datasets.Dataset.from_list(rows)
    return found


def _query_rows(queries: str | Path | Iterable[str | Mapping[str, Any]]) -> list[dict[str, str]]:
    source = read_rows(queries) if isinstance(queries, str | Path) else list(queries)
    rows: list[dict[str, str]] = []
    for position, item in enumerate(source):
        query = item if isinstance(item, str) else item.get("query")
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"Row {position} has no text under the key 'query': {str(item)[:120]!r}.")
        row_id = str(position) if isinstance(item, str) else str(item.get("id", position))
        rows.append({"id": row_id, "query": without_lone_surrogates(query)})
    repeated = [row_id for row_id, times in Counter(row["id"] for row in rows).items() if times > 1]
    if repeated:
        raise ValueError(f"{len(repeated)} ids occur more than once, the first is {repeated[0]!r}.")
    return rows


def _digest(rows: list[dict[str, str]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode("utf-8", "backslashreplace")).hexdigest()
