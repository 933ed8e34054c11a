"""Encoding a corpus part by part: each part is written whole, so that a killed run goes on where it stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from llm2vec_gen_st.corpus.plan import HOLDS, MANIFEST, CorpusPlan, Slice, plan_corpus
from llm2vec_gen_st.corpus.reading import Passage, Passages
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_table
from llm2vec_gen_st.manifests import read_manifest
from llm2vec_gen_st.parts import PartFolder, run_of_parts

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

ENCODER_MANIFEST = "encoder.json"
# In the metadata of each part's schema: what made its vectors.
FINGERPRINT_KEY = b"llm2vec_gen.fingerprint"


class CorpusEncoder:
    """Writes parts of a folder of embeddings.

    Args:
        plan: The corpus.
        output_dir: The folder.
        model: The student.
        prompt_name: Name of the instruction before each passage; None for none.
        batch_size: Passages run at once.

    Raises:
        ValueError: If the folder holds embeddings of another model, dtype or instruction.
        MissingExtraError: If pyarrow is not installed.
    """

    def __init__(
        self,
        plan: CorpusPlan,
        output_dir: str | Path,
        model: LLM2VecGen,
        *,
        prompt_name: str | None = "document",
        batch_size: int = 32,
    ) -> None:
        from llm2vec_gen_st.fingerprint import student_fingerprint

        self._pyarrow = require("pyarrow", extra="train", why="writing embeddings as Parquet")
        if prompt_name is not None and prompt_name not in model.prompts:
            raise ValueError(
                f"The model has no instruction {prompt_name!r}; it has {', '.join(sorted(model.prompts))}."
            )
        self._instruction = "" if prompt_name is None else (model.prompts[prompt_name] or "")
        self._fingerprint = student_fingerprint(model, (model.prompts.get("query") or "", self._instruction))
        self._parts = PartFolder(Path(output_dir), HOLDS)
        self._parts.claim(
            ENCODER_MANIFEST,
            {
                "fingerprint": self._fingerprint,
                "dtype": str(model.llm.dtype).removeprefix("torch."),
                "instruction": self._instruction,
            },
        )
        self._plan = plan
        self._model = model
        self._batch_size = batch_size
        self._reader = Passages(plan.files, plan.columns)

    def finish(self, number: int) -> int:
        """Write a part, unless it is there. Its passages are read and compared with the plan in any case.

        Args:
            number: The part.

        Returns:
            Number of passages encoded; 0 if the part was there.

        Raises:
            ValueError: If the corpus has changed since the folder was begun.
            FloatingPointError: If an embedding is not finite; names the part and its ids.
        """
        passages = self._plan.passages(self._reader, number)
        if self._parts.is_finished(number, len(passages)):
            return 0
        try:
            vectors: np.ndarray = self._model.encode(
                [passage.text for passage in passages],
                prompt=self._instruction,
                batch_size=self._batch_size,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        except FloatingPointError as error:
            path = self._plan.files[self._plan.slices[number].file]
            raise FloatingPointError(
                f"{path}, part {number} (ids {passages[0].id!r} to {passages[-1].id!r}): {error}"
            ) from error
        write_table(self._parts.path(number), self._table(passages, vectors))
        return len(passages)

    def _table(self, passages: list[Passage], vectors: np.ndarray) -> Any:
        pyarrow = self._pyarrow
        columns: dict[str, Any] = {"id": pyarrow.array([passage.id for passage in passages], pyarrow.string())}
        keep = set(self._plan.columns.keep)
        if "text" in keep:
            columns["text"] = pyarrow.array([passage.text for passage in passages], pyarrow.string())
        if keep - {"text"}:
            objects = [json.dumps(_finite(passage.metadata), default=str) for passage in passages]
            columns["metadata"] = pyarrow.array(objects, pyarrow.string())
        flat = pyarrow.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
        columns["embedding"] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        return pyarrow.table(columns).replace_schema_metadata({FINGERPRINT_KEY: self._fingerprint.encode()})


def _finite(value: Any) -> Any:
    """A value with None for numbers that are not finite, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def encode_corpus(
    model: str | LLM2VecGen,
    corpus: str | Path | Iterable[str | Path],
    output_dir: str | Path,
    *,
    shard: str = "0/1",
    prompt_name: str | None = "document",
    rows_per_part: int = 8192,
    batch_size: int = 32,
    id_column: str = "id",
    text_column: str | None = None,
    keep: Iterable[str] = (),
    progress: bool = True,
) -> Path:
    r"""Encode a corpus of any size into a folder of Parquet parts, resumably.

    The corpus is streamed; memory holds one part. The same call again writes only what is missing, so a killed run ends
    with the rows of an unbroken one, none twice. Any number of processes and machines that see the folder may share the
    work by ``shard``; of a part that two of them write, one whole version stays. A part that was damaged since
    is written anew.

    Args:
        model: A name, directory or hub id, or a loaded student.
        corpus: A ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, a folder of them, or several. Every row needs an id of
            its own.
        output_dir: Folder of the parts, of ``corpus.json`` (what is encoded) and of ``encoder.json`` (by what).
        shard: ``i/N``: encode the i-th (0-based) of N equal runs of parts only.
        prompt_name: Name of the instruction before each passage; None for none.
        rows_per_part: Passages of one part, which is what a killed run loses at most.
        batch_size: Passages run at once.
        id_column: Column of the ids (texts or whole numbers).
        text_column: Column of the texts; the first of ``text``, ``query`` and ``passage`` if None.
        keep: Columns to write beside the vectors: ``text`` (whatever its column) as it is, all others together as JSON
            in the column ``metadata``, where numbers that are not finite become null.
        progress: Whether progress bars are shown.

    Returns:
        The folder. Its parts have the columns ``id`` and ``embedding`` (D float32), and ``text`` and ``metadata`` if
        they are kept; :func:`finished_parts` lists them.

    Raises:
        ValueError: If a row has no id or text, an id comes twice (all name the row), or the folder was begun with
            another corpus, model or setting.
        FileNotFoundError: If the corpus is not there.

    Example:
        >>> import tempfile
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> folder = Path(tempfile.mkdtemp())
        >>> rows = '{"id": "n", "text": "Bees make honey."}', '{"id": "e", "text": "Seals swim."}'
        >>> _ = (folder / "corpus.jsonl").write_text("\n".join(rows))
        >>> parts = encode_corpus(tiny_model(), folder / "corpus.jsonl", folder / "vectors", progress=False)
        >>> [path.name for path in finished_parts(parts)]
        ['part-000000.parquet']
    """
    plan = plan_corpus(
        corpus,
        output_dir,
        rows_per_part=rows_per_part,
        id_column=id_column,
        text_column=text_column,
        keep=keep,
        progress=progress,
    )
    mine = run_of_parts(len(plan.slices), shard)
    if isinstance(model, str):
        from llm2vec_gen_st.model import LLM2VecGen

        model = LLM2VecGen(model)
    encoder = CorpusEncoder(plan, output_dir, model, prompt_name=prompt_name, batch_size=batch_size)
    total = sum(plan.slices[number].rows for number in mine)
    with tqdm(total=total, desc="encoding", unit="passage", disable=not progress) as bar:
        for number in mine:
            encoder.finish(number)
            bar.update(plan.slices[number].rows)
    return Path(output_dir)


def finished_parts(folder: str | Path, *, partial: bool = False) -> list[Path]:
    """The parts of an encoded corpus, each checked to be there and to have its rows.

    Args:
        folder: What :func:`encode_corpus` wrote.
        partial: Whether missing parts are accepted.

    Raises:
        ValueError: If parts are missing (says how many, and the first) or damaged (names the first).
        FileNotFoundError: If the folder holds no ``corpus.json``.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: the folder holds no encoded corpus.")
    slices = [Slice.parse(line) for line in read_manifest(path)["slices"]]
    return PartFolder(Path(folder), HOLDS).finished([piece.rows for piece in slices], partial=partial)
