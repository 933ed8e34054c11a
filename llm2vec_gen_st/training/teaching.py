"""Target embeddings of a run: the teacher made ready, and its vectors of every row's response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.llm2vec import LLM2VecTransformer, adapter_folder, llm2vec, published_adapters
from llm2vec_gen_st.baselines.llm_module import CONFIG_FILE
from llm2vec_gen_st.baselines.loading import saved_kind
from llm2vec_gen_st.baselines.lora_stack import read_adapter
from llm2vec_gen_st.modules.frozen_llm import read_config
from llm2vec_gen_st.modules.lora import remove_lora
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.training.data import LABEL, NEGATIVE_LABEL, NEGATIVE_QUERY, NEGATIVE_RESPONSE, prepare_labels
from llm2vec_gen_st.training.processes import spread
from llm2vec_gen_st.training.recipes import Recipe

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Targets:
    """Rows with their target embeddings.

    Args:
        rows: The rows, with the columns ``label`` and, if they have hard negatives with responses, ``negative_label``.
        labels: Those of the rows (N, D).
        held_out: Those of the held-out rows (M, D); ``None`` if there are none.
    """

    rows: Dataset
    labels: np.ndarray
    held_out: np.ndarray | None


def with_targets(
    rows: Dataset,
    held: Dataset,
    recipe: Recipe,
    teacher: str | SentenceTransformer | None,
    backbone: Backbone,
    *,
    cache: str | Path,
    progress: bool = True,
) -> Targets:
    """Target embeddings of training and held-out rows, centred and scaled as the recipe says.

    Args:
        rows: What :func:`~llm2vec_gen_st.training.data.student_rows` made; a column ``label`` is taken as it is.
        held: Held-out rows.
        recipe: The recipe.
        teacher: The teacher, unless the rows have labels.
        backbone: The student's LLM.
        cache: SQLite file of teacher embeddings.
        progress: Whether progress bars are shown.

    Raises:
        ValueError: If a label that was given is not finite; names the row.
    """
    given = LABEL in rows.column_names
    with ready_teacher(None if given else teacher, backbone, model_kwargs={"dtype": recipe.dtype}) as ready:

        def vectors(source: Dataset, texts: str, labels: str, chosen: Sequence[int]) -> np.ndarray:
            if given:
                return _finite_labels(source.select(chosen)[labels], labels, chosen)
            assert ready is not None
            found = list(source.select(chosen)[texts])
            return spread(
                found,
                lambda share: teacher_embeddings(share, ready, backbone=backbone, cache=cache, progress=progress),
            )

        own, mean = prepare_labels(vectors(rows, "response", LABEL, range(len(rows))), recipe)
        labelled = _with_column(rows, LABEL, list(own))
        held_out = None
        if len(held):
            held_out, _ = prepare_labels(vectors(held, "response", LABEL, range(len(held))), recipe, mean)
        column = NEGATIVE_LABEL if given else NEGATIVE_RESPONSE
        if column in rows.column_names:
            chosen = [number for number, text in enumerate(rows[NEGATIVE_QUERY]) if text]
            found, _ = prepare_labels(vectors(rows, NEGATIVE_RESPONSE, NEGATIVE_LABEL, chosen), recipe, mean)
            negative = np.zeros_like(own)
            negative[chosen] = found
            labelled = _with_column(labelled, NEGATIVE_LABEL, list(negative))
    return Targets(labelled, own, held_out)


def _finite_labels(given: Sequence[Any], column: str, rows: Sequence[int]) -> np.ndarray:
    found = np.asarray(given, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(found).all(axis=1))
    if len(bad):
        raise ValueError(
            f"The column {column!r} holds values that are not finite in {len(bad)} training rows, the first in row "
            f"{rows[bad[0]]} of those; leave such rows out."
        )
    return found


def _with_column(rows: Dataset, name: str, values: list[Any]) -> Dataset:
    kept = rows.remove_columns(name) if name in rows.column_names else rows
    return kept.add_column(name, values)


@contextmanager
def ready_teacher(
    teacher: str | SentenceTransformer | None, backbone: Backbone, *, model_kwargs: dict[str, Any] | None = None
) -> Iterator[str | SentenceTransformer | None]:
    """A block in which a teacher can embed; an LLM2Vec teacher of the student's own LLM runs on the one copy of it.

    LLM2Vec teachers are published adapters, or what :func:`~llm2vec_gen_st.baselines.train_llm2vec` wrote. Their LoRA
    layers are taken out of the LLM behind the block.

    Args:
        teacher: A name, or a loaded teacher.
        backbone: The student's LLM.
        model_kwargs: How another base model is loaded, if the adapter names one.

    Yields:
        The LLM2Vec encoder, or the teacher as it was given.

    Raises:
        CheckpointError: If an adapter cannot be had or read.
    """
    if not isinstance(teacher, str):
        yield teacher
        return
    adapters = published_adapters(teacher)
    trained = saved_kind(teacher) == LLM2VecTransformer.__name__
    if not (adapters or trained):
        yield teacher
        return
    if trained:
        reference, _ = read_config(Path(teacher) / CONFIG_FILE, LLM2VecTransformer.setting_kinds)
        named: str | None = reference.id
    else:
        _, named = read_adapter(adapter_folder(adapters[0]))
    if not _names(named, backbone):
        yield llm2vec(teacher, model_kwargs=model_kwargs)
        return
    model = llm2vec(teacher, base=backbone) if trained else llm2vec(backbone, adapters=adapters)
    try:
        yield model
    finally:
        remove_lora(backbone.llm)


def _names(base: str | None, backbone: Backbone) -> bool:
    """Whether an adapter's base model is this one."""
    return base is not None and backbone.reference.id in (base, str(Path(base).resolve()))
