"""Saved baselines: telling them from base models, and loading them on a backbone that is already there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.baselines.llm_module import LLMModule, as_sentence_transformer, encoder_of
from llm2vec_gen_st.checkpoints.directory import HOST_CONFIG_FILE, MODULES_FILE, read_modules
from llm2vec_gen_st.modules.config import read_json_object
from llm2vec_gen_st.modules.lora import lora_removed_on_failure
from llm2vec_gen_st.modules.tensors import CheckpointError

_PACKAGE = "llm2vec_gen_st.baselines."


def is_baseline(path: str | Path) -> bool:
    """Whether a directory was written by a baseline's ``save_pretrained``."""
    return saved_kind(path) is not None


def saved_kind(path: str | Path) -> str | None:
    """Name of the module class that a directory holds, or ``None`` if it holds no baseline."""
    if not (Path(path) / MODULES_FILE).is_file():
        return None
    kinds = [kind for kind, _ in read_modules(Path(path))]
    return kinds[0].rpartition(".")[2] if kinds and kinds[0].startswith(_PACKAGE) else None


def encoder_of_base_or_saved(
    kind: type[LLMModule],
    base_or_path: str | Path | Backbone,
    *,
    base: str | Backbone | None,
    prompts: Mapping[str, str] | None,
    device: str | None,
    model_kwargs: dict[str, Any] | None,
    **settings: Any,
) -> SentenceTransformer:
    """A baseline that may have been trained: of a plain LLM, with these settings, or of a saved one, with its own.

    Arguments and errors as in :func:`load_baseline` and :func:`~llm2vec_gen_st.baselines.llm_module.encoder_of`.
    """
    if not isinstance(base_or_path, Backbone) and is_baseline(base_or_path):
        return load_baseline(base_or_path, kind, base=base, prompts=prompts, device=device, model_kwargs=model_kwargs)
    return encoder_of(kind, base_or_path, prompts=prompts, device=device, model_kwargs=model_kwargs, **settings)


def load_baseline(
    path: str | Path,
    kind: type[LLMModule],
    *,
    base: str | Backbone | None = None,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """Load what a baseline's ``save_pretrained`` wrote.

    ``SentenceTransformer(path, trust_remote_code=True)`` loads it too; this also takes a backbone to share.

    Args:
        path: The directory.
        kind: The module class that it must hold.
        base: Another place of the base model, or a loaded backbone; its weights are compared with those recorded.
        prompts: Instructions by name, added to the saved ones.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.

    Returns:
        The encoder.

    Raises:
        CheckpointError: If the directory holds another kind of model, or its files are not what they should be.
        BaseModelError: If the base model is missing or another one.
    """
    found = saved_kind(path)
    if found != kind.__name__:
        raise CheckpointError(f"{path} holds a {found or 'model that is no baseline'}, not a {kind.__name__}.")
    backbone = load_backbone(base, model_kwargs=model_kwargs) if isinstance(base, str) else base
    with lora_removed_on_failure(backbone.llm if backbone is not None else None):
        module = kind.load(str(path), backbone=backbone, model_kwargs=model_kwargs)
    saved = read_json_object(Path(path) / HOST_CONFIG_FILE).get("prompts") or {}
    return as_sentence_transformer(
        module, prompts={**saved, **(prompts or {})}, device=device, model_kwargs=model_kwargs
    )
