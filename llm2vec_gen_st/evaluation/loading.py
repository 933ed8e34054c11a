"""Any model by name: a student in one of its forms, a baseline on a base LLM, or another SentenceTransformer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.baselines.loading import is_baseline
from llm2vec_gen_st.baselines.registry import BASELINES, build
from llm2vec_gen_st.checkpoints.directory import MODULES_FILE, STOCK_MODULES, read_modules
from llm2vec_gen_st.checkpoints.hub import fetch_checkpoint
from llm2vec_gen_st.checkpoints.registry import find_known
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.teachers.sources import MINILM, packaged_minilm


def names_baseline(name: str) -> bool:
    """Whether a name is one of a baseline's; a saved model in a directory of that name goes first.

    Example:
        >>> names_baseline("echo"), names_baseline("llm2vec-gen-smollm2-135m")
        (True, False)
    """
    return name in BASELINES and not (Path(name) / MODULES_FILE).is_file()


def load_model(
    name_or_path: str,
    *,
    base: str | None = None,
    options: Mapping[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """Load a model to evaluate.

    Args:
        name_or_path: What :class:`~llm2vec_gen_st.LLM2VecGen` takes; the name of a baseline
            (:data:`~llm2vec_gen_st.baselines.BASELINES`); the directory of a saved one; or the directory or hub id of
            any model made of stock sentence-transformers modules, such as a native export or ``all-MiniLM-L6-v2``.
        base: For a baseline's name, hub id or directory of the LLM it is made of; a trained baseline's too.
        options: For a baseline's name, options of its constructor.
        model_kwargs: Passed on when weights are loaded (``dtype``, ...).

    Returns:
        The model.

    Raises:
        ValueError: If a baseline is named without a base LLM, or a base LLM or options are given for anything else.
        CheckpointError: If nothing is found, or its files are not what they should be.
        BaseModelError: If the base LLM is missing.
    """
    if names_baseline(name_or_path):
        if base is None:
            raise ValueError(
                f"{name_or_path!r} is a baseline, which needs an LLM to run on: name one with base (command: --base)."
            )
        return build(name_or_path, base, model_kwargs=model_kwargs, **(options or {}))
    if base is not None or options:
        raise ValueError(
            f"A base LLM and options go with the name of a baseline ({', '.join(BASELINES)}); {name_or_path!r} is none"
            " (or a saved model of that name is in the current directory), and has its own."
        )
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
