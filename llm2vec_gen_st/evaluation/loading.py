"""Any model by name: a student in one of its forms, or another SentenceTransformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.baselines.loading import is_baseline
from llm2vec_gen_st.checkpoints.directory import MODULES_FILE, STOCK_MODULES, read_modules
from llm2vec_gen_st.checkpoints.hub import fetch_checkpoint
from llm2vec_gen_st.checkpoints.registry import find_known
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.teachers.sources import MINILM, packaged_minilm


def load_model(name_or_path: str, *, model_kwargs: dict[str, Any] | None = None) -> SentenceTransformer:
    """Load a model to evaluate.

    Args:
        name_or_path: What :class:`~llm2vec_gen_st.LLM2VecGen` takes; the directory of a saved baseline; or the
            directory or hub id of any model made of stock sentence-transformers modules, such as a native export or
            ``all-MiniLM-L6-v2``.
        model_kwargs: Passed on when weights are loaded (``dtype``, ...).

    Returns:
        The model.

    Raises:
        CheckpointError: If nothing is found, or its files are not what they should be.
    """
    if name_or_path.removeprefix("sentence-transformers/") == MINILM and (folder := packaged_minilm()) is not None:
        return SentenceTransformer(str(folder), model_kwargs=model_kwargs)
    if is_baseline(name_or_path):
        # The flag lets the host import our own classes; it asks for that before any other package's.
        return SentenceTransformer(name_or_path, model_kwargs=model_kwargs, trust_remote_code=True)
    if find_known(name_or_path) is None and _is_stock(name_or_path):
        return SentenceTransformer(name_or_path, model_kwargs=model_kwargs)
    return LLM2VecGen(name_or_path, model_kwargs=model_kwargs)


def _is_stock(name_or_path: str) -> bool:
    """Whether the first module is one of the host's; of a model on the hub only small files are fetched for this."""
    directory = Path(name_or_path)
    if not directory.is_dir():
        directory = fetch_checkpoint(name_or_path, LoadOptions())
    modules = read_modules(directory) if (directory / MODULES_FILE).is_file() else []
    return bool(modules) and modules[0][0].startswith(STOCK_MODULES)
