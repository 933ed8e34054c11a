"""Latent lens: the corpus tokens whose states in the frozen LLM are nearest to a compression token's."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm
from typing_extensions import Self

from llm2vec_gen_st.backbone import embedding_weight
from llm2vec_gen_st.base_reference import BaseModelError, BaseReference, check_base
from llm2vec_gen_st.encoding import as_rows, instruction_options
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.interpret.contexts import (
    Context,
    ContextWriter,
    SpanTokenizer,
    TokenSpan,
    as_corpus_text,
    context_of,
    count_contexts,
    is_being_written,
    read_contexts,
)
from llm2vec_gen_st.interpret.states import (
    check_states,
    compression_states,
    hidden_states,
    resolved_layer,
)
from llm2vec_gen_st.modules.config import check_fields, read_json_object
from llm2vec_gen_st.modules.groups import similar_lengths
from llm2vec_gen_st.modules.lora import lora_enabled
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.modules.tensors import CheckpointError

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

MANIFEST_FILE, INDEX_FILE, CONTEXTS_FILE = "latent_lens.json", "states.faiss", "contexts.sqlite"
FORMAT_VERSION = 1

_MANIFEST = {
    "format_version": "a whole number",
    "base": "an object",
    "layer": "a whole number",
    "texts": "a whole number",
    "tokens": "a whole number",
}
_OPTIONAL_BASE = dict.fromkeys(("revision", "fingerprint", "embedding_sample"), "text or null")


@dataclass(frozen=True)
class ContextMatch:
    """One corpus token that is near to a compression token.

    Args:
        input: Which of the texts, from 0.
        text: That text.
        position: Which compression token, from 0.
        rank: Place among the nearest, from 1.
        similarity: Cosine of the two states.
        token_id: The corpus token's id.
        token: Its characters.
        sentence: The sentence around it.
        start: Where the token starts in the sentence, in characters.
        stop: Where it ends.
    """

    input: int
    text: str
    position: int
    rank: int
    similarity: float
    token_id: int
    token: str
    sentence: str
    start: int
    stop: int

    @property
    def parts(self) -> tuple[str, str, str]:
        """The sentence before the token, the token, and the sentence behind it."""
        return self.sentence[: self.start], self.sentence[self.start : self.stop], self.sentence[self.stop :]


class LatentLens:
    """Token states of a corpus in a FAISS index, and the sentences they come from.

    Made by :func:`build_latent_lens` and opened again by :meth:`load`. The index is mapped into memory, so opening a
    large one takes no time, and processes share it.
    """

    def __init__(self, folder: Path, model: LLM2VecGen, index: Any, layer: int) -> None:
        self.folder = folder
        self.layer = layer
        self._model = model
        self._index = index

    def __len__(self) -> int:
        """Number of token states."""
        return int(self._index.ntotal)

    @classmethod
    def load(cls, folder: str | Path, model: LLM2VecGen) -> Self:
        """Open a saved index.

        Args:
            folder: Its folder.
            model: A student on the LLM whose states it holds.

        Raises:
            FileNotFoundError: If there is no such index.
            CheckpointError: If its files are not what they should be.
            BaseModelError: If it holds states of another LLM; names both.
        """
        faiss = _faiss()
        folder = Path(folder)
        if not (folder / MANIFEST_FILE).is_file():
            raise FileNotFoundError(
                f"{folder}: there is no index here (no {MANIFEST_FILE}); `latent-lens build` makes one."
            )
        manifest = _read_manifest(folder / MANIFEST_FILE)
        _check_llm(folder, BaseReference(**manifest["base"]), model.backbone.reference)
        path = folder / INDEX_FILE
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: FAISS cannot read it ({str(error).rpartition(':')[2].strip()}).") from error
        if index.d != model.backbone.hidden_size:
            raise CheckpointError(
                f"{path}: its states have {index.d} dimensions, the LLM's {model.backbone.hidden_size}."
            )
        try:
            contexts = count_contexts(folder / CONTEXTS_FILE)
        except sqlite3.DatabaseError as error:
            raise CheckpointError(f"{folder / CONTEXTS_FILE}: it cannot be read ({error}).") from error
        if not index.ntotal == contexts == manifest["tokens"]:
            raise CheckpointError(
                f"{folder}: the files do not belong together: {manifest['tokens']} tokens in {MANIFEST_FILE}, "
                f"{index.ntotal} in {INDEX_FILE}, {contexts} in {CONTEXTS_FILE}. Build the index again."
            )
        return cls(folder, model, index, manifest["layer"])

    def nearest(
        self,
        texts: str | Iterable[str],
        *,
        k: int = 5,
        prompt_name: str | None = "query",
        prompt: str | None = None,
    ) -> list[ContextMatch]:
        """The corpus tokens nearest to each compression token of some texts, at the index's layer.

        Args:
            texts: A string or any iterable of N strings.
            k: Tokens a position.
            prompt_name: Name of the instruction.
            prompt: The instruction itself, instead.

        Returns:
            Up to N * n * k matches, by text, position and rank; ``pandas.DataFrame(...)`` takes them as they are.

        Raises:
            TypeError: If a text is not a string.
            ValueError: If ``k`` is not positive.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}.")
        inputs = as_rows(texts)
        instruction = instruction_options(prompt_name, prompt)
        states = compression_states(self._model, inputs, layer=self.layer, **instruction)
        n = states.shape[1]
        if not inputs:
            return []
        similarity, rows = self._index.search(_unit(states.flatten(0, 1)), min(k, len(self)))
        contexts = read_contexts(self.folder / CONTEXTS_FILE, rows.flatten().tolist())
        found = []
        for place, (values, numbers) in enumerate(zip(similarity.tolist(), rows.tolist(), strict=True)):
            number, position = divmod(place, n)
            for rank, (value, row) in enumerate(zip(values, numbers, strict=True), 1):
                context = contexts[row]
                found.append(
                    ContextMatch(
                        input=number,
                        text=inputs[number],
                        position=position,
                        rank=rank,
                        similarity=value,
                        token_id=context.token_id,
                        token=context.sentence[context.start : context.stop],
                        sentence=context.sentence,
                        start=context.start,
                        stop=context.stop,
                    )
                )
        return found


@torch.inference_mode()
def build_latent_lens(
    model: LLM2VecGen,
    texts: Iterable[str],
    folder: str | Path,
    *,
    layer: int = -1,
    max_text_tokens: int = 256,
    tokens_per_text: int = 64,
    max_tokens: int = 200_000,
    batch_size: int = 32,
    progress: bool = True,
) -> LatentLens:
    """Read a corpus with the plain LLM and keep the states of its tokens, scaled to length 1, in an index.

    Texts are read as they come, ``batch_size`` at a time, and their states go into the index at once. What grows in
    memory is the index alone: up to ``max_tokens * H`` float32 values. The folder appears when all is written; a build
    that is killed leaves ``<folder>.partial`` behind, which does not load and which the next build replaces.

    Args:
        model: A student; its plain LLM reads the corpus, without suffix, instruction or LoRA layers.
        texts: Texts of the corpus, such as responses; long documents are better given passage by passage.
        folder: Where the index goes; must not exist, or be empty.
        layer: Which states, as in :func:`~llm2vec_gen_st.interpret.states.resolved_layer`.
        max_text_tokens: Tokens of a text that are read; the rest of it is left out.
        tokens_per_text: Most tokens of a text that are kept, evenly spaced.
        max_tokens: Most tokens that are kept in all; no further text is read then.
        batch_size: Texts read at once.
        progress: Whether a progress bar is shown.

    Returns:
        The index, opened.

    Raises:
        FileExistsError: If the folder is there already, or another build is writing it.
        TypeError: If a text is not a string; names its position.
        ValueError: If a limit is not positive, the LLM has no such layer, or the texts hold no token at all.
        FloatingPointError: If a state is not finite.
    """
    limits = {
        "max_text_tokens": max_text_tokens,
        "tokens_per_text": tokens_per_text,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
    }
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if isinstance(texts, str):
        raise TypeError("texts must be an iterable of strings, got one string.")
    faiss = _faiss()
    layer = resolved_layer(model.llm, layer)
    folder = Path(folder)
    index = faiss.IndexFlatIP(model.backbone.hidden_size)
    count = 0
    total = len(texts) if isinstance(texts, Sequence) else None
    with (
        _written_at_once(folder) as partial,
        closing(ContextWriter(partial / CONTEXTS_FILE)) as writer,
        tqdm(total=total, desc="read", unit="text", disable=not progress) as bar,
    ):
        for contexts, states in _token_states(model, texts, layer, max_text_tokens, tokens_per_text, batch_size):
            kept = min(len(contexts), max_tokens - index.ntotal)
            if kept:
                index.add(states[:kept])
                writer.add(contexts[:kept])
            count += 1
            bar.set_postfix(tokens=index.ntotal, refresh=False)
            bar.update()
            if index.ntotal == max_tokens:
                break
        if not index.ntotal:
            raise ValueError(f"{folder}: there is no token in the corpus ({count} texts), so nothing to index.")
        writer.finish()
        faiss.write_index(index, str(partial / INDEX_FILE))
        manifest = {
            "format_version": FORMAT_VERSION,
            "base": asdict(model.backbone.reference),
            "layer": layer,
            "texts": count,
            "tokens": index.ntotal,
        }
        write_json(partial / MANIFEST_FILE, manifest)
    return LatentLens.load(folder, model)


def _token_states(
    model: LLM2VecGen,
    texts: Iterable[str],
    layer: int,
    max_text_tokens: int,
    tokens_per_text: int,
    batch_size: int,
) -> Iterator[tuple[list[Context], np.ndarray]]:
    """For each text its chosen tokens in context, and their states (tokens, H) float32 of length 1."""
    tokenizer = SpanTokenizer(model.backbone.tokenizer)
    incoming = enumerate(texts)
    while batch := list(itertools.islice(incoming, batch_size)):
        checked = [as_corpus_text(text, number) for number, text in batch]
        read = [tokenizer.spans(text, max_text_tokens) for text in checked]
        chosen = [_evenly(spans, tokens_per_text) for _, spans in read]
        states = _text_states(model, [ids for ids, _ in read], chosen, layer)
        for text, spans, vectors in zip(checked, chosen, states, strict=True):
            yield [context_of(text, span) for span in spans], vectors


def _text_states(
    model: LLM2VecGen, rows: Sequence[list[int]], chosen: Sequence[Sequence[TokenSpan]], layer: int
) -> list[np.ndarray]:
    """States of length 1, (tokens, H) float32 a text, of the chosen tokens of each row of ids."""
    found = [np.zeros((0, model.backbone.hidden_size), np.float32) for _ in rows]
    embed, device = model.llm.get_input_embeddings(), embedding_weight(model.llm).device
    with lora_enabled(model.llm, False):
        for group in similar_lengths([len(ids) for ids in rows], model.suffix_transformer.max_batch_tokens):
            ids = pad_right([rows[row] for row in group])["input_ids"]
            if not ids.shape[1]:
                continue
            states = hidden_states(model.llm, embed(ids.to(device)), layer)
            for row, its_states in zip(group, states, strict=True):
                places = [span.place for span in chosen[row]]
                found[row] = _unit(its_states[places].float().cpu())
    return found


def _evenly(spans: Sequence[TokenSpan], most: int) -> list[TokenSpan]:
    """At most so many of the tokens, evenly spaced."""
    if len(spans) <= most:
        return list(spans)
    return [spans[(2 * number + 1) * len(spans) // (2 * most)] for number in range(most)]


def _unit(states: torch.Tensor) -> np.ndarray:
    """States (N, H) scaled to length 1, as FAISS takes them."""
    check_states(states)
    unit: np.ndarray = torch.nn.functional.normalize(states, dim=1).numpy()
    return np.ascontiguousarray(unit, dtype=np.float32)


@contextmanager
def _written_at_once(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of ``folder`` when the block ends well and is gone when it fails."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder; choose another one.")
    partial = folder.with_name(folder.name + ".partial")
    if is_being_written(partial / CONTEXTS_FILE):
        raise FileExistsError(f"{partial}: another build is writing this index; wait for it, or choose another folder.")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for name in (INDEX_FILE, CONTEXTS_FILE):
            with open(partial / name, "rb") as handle:
                os.fsync(handle.fileno())
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json_object(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path}: only format_version {FORMAT_VERSION} can be read; update llm2vec-gen-st.")
    check_fields(str(path), manifest, _MANIFEST)
    check_fields(f"{path}, base", manifest["base"], {"id": "text"}, _OPTIONAL_BASE)
    return manifest


def _check_llm(folder: Path, expected: BaseReference, found: BaseReference) -> None:
    try:
        check_base(expected, found)
    except BaseModelError as error:
        raise BaseModelError(
            f"{folder}: this index holds states of the LLM {expected}, but the model stands on {found}, and states of "
            "two LLMs cannot be compared. Give a model on the index's LLM, or build an index with this one."
        ) from error


def _faiss() -> Any:
    return require("faiss", extra="faiss", why="a latent lens")
