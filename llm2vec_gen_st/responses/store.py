"""Responses on disk: one part a batch, each written whole, so that a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import read_rows, write_json, write_rows
from llm2vec_gen_st.responses.generation import GenerationSettings, generate_responses
from llm2vec_gen_st.text import TextTokenizer, without_lone_surrogates

if TYPE_CHECKING:
    from datasets import Dataset

MANIFEST = "responses.json"


def write_responses(
    queries: str | Path | Iterable[str | Mapping[str, Any]],
    output_dir: str | Path,
    writer: str | Backbone,
    *,
    batch_size: int = 64,
    shard: str = "0/1",
    part_format: Literal["parquet", "jsonl"] = "parquet",
    progress: bool = True,
    **settings: Any,
) -> Path:
    """Let a frozen LLM respond to every query, resumably (paper, section 3: self-generated responses).

    Queries are sorted by length and dealt into fixed batches; each finished batch becomes one part file. The
    same call again skips the parts that are there, so a killed run ends with the rows of an unbroken one.

    Args:
        queries: A ``.jsonl``, ``.jsonl.gz``, ``.parquet`` or ``.txt`` file, or an iterable of strings or of rows
            with the key ``query`` (and optionally ``id``).
        output_dir: Folder of the parts and of ``responses.json``, which records how they were made.
        writer: The LLM: a hub id, a directory, or a loaded :class:`~llm2vec_gen_st.backbone.Backbone`.
        batch_size: Queries written at once.
        shard: ``i/N``: write every N-th batch, starting with batch i (0-based), into the same folder.
        part_format: File format of the parts.
        progress: Whether a progress bar with tokens/s is shown.
        **settings: Fields of :class:`~llm2vec_gen_st.responses.GenerationSettings`.

    Returns:
        The folder; read it with :func:`read_responses`.

    Raises:
        ValueError: If a row has no query, ids repeat, or the folder holds responses made with other settings.
    """
    rows = _query_rows(queries)
    index, count = _parse_shard(shard)
    backbone = load_backbone(writer) if isinstance(writer, str) else writer
    generation = GenerationSettings(**settings)
    plain = TextTokenizer(backbone.tokenizer)
    folder = Path(output_dir)
    rows.sort(key=lambda row: (len(row["query"]), row["id"]))
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    _claim(
        folder,
        {
            "queries_sha256": _digest(rows),
            "queries": len(rows),
            "batches": len(batches),
            "batch_size": batch_size,
            "part_format": part_format,
            "writer": {**asdict(backbone.reference), "dtype": str(backbone.llm.dtype).removeprefix("torch.")},
            "settings": asdict(generation),
        },
    )
    # Shuffled, so that a run stopped early holds short and long queries alike and its forecast of the time is fair.
    shuffled = random.Random(0).sample(range(len(batches)), len(batches))
    mine = [number for number in shuffled if number % count == index]
    todo = [number for number in mine if not _part(folder, number, part_format).exists()]
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
            batch = batches[number]
            responses = generate_responses(backbone, plain, [row["query"] for row in batch], generation, seed=number)
            write_rows(
                _part(folder, number, part_format),
                [
                    {**row, "response": response.text, "response_tokens": response.tokens, "flag": response.flag}
                    for row, response in zip(batch, responses, strict=True)
                ],
            )
            flags.update(response.flag for response in responses)
            tokens += sum(response.tokens for response in responses)
            bar.update(len(batch))
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix({"tokens/s": f"{tokens / elapsed:.0f}" if elapsed else "?", **flags})
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
        ValueError: If parts are missing (names how many and the first), or no row is left.
    """
    datasets = require("datasets", extra="train", why="reading responses as a dataset")
    folder = Path(folder)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    parts = [_part(folder, number, manifest["part_format"]) for number in range(manifest["batches"])]
    missing = [part.name for part in parts if not part.exists()]
    if missing and not partial:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(parts)} parts are missing, the first is {missing[0]}. "
            "Run the same `respond` command again to write them."
        )
    wanted = set(include)
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for part in parts:
        if part.exists():
            for row in read_rows(part):
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


def _parse_shard(shard: str) -> tuple[int, int]:
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ValueError(f"shard {shard!r} is not of the form i/N with 0 <= i < N.")
    return int(index), int(count)


def _digest(rows: list[dict[str, str]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode("utf-8", "backslashreplace")).hexdigest()


def _part(folder: Path, number: int, part_format: str) -> Path:
    return folder / f"part-{number:06d}.{part_format}"


def _claim(folder: Path, manifest: dict[str, Any]) -> None:
    path = folder / MANIFEST
    if not path.exists():
        write_json(path, manifest)
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    different = {key: (found.get(key), value) for key, value in manifest.items() if found.get(key) != value}
    if different:
        described = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in different.items())
        raise ValueError(
            f"{folder} holds responses made differently ({described}). Repeat the first command, or choose "
            "another folder."
        )
