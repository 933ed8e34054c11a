"""Fetching a checkpoint's files from the Hugging Face hub: the small, safe ones only."""

from __future__ import annotations

from pathlib import Path

from llm2vec_gen_st.checkpoints.registry import KNOWN_MODELS
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.tensors import CheckpointError

# Adapters and heads by name, so that neither pickled trainer state nor a whole LLM under a mistaken id is fetched.
_FILES = [
    "*.json",
    "*.jinja",
    "run_config.yml",
    "README.md",
    "suffix.safetensors",
    "lora.safetensors",
    "*_ResponseHead/model.safetensors",
    "encoder/adapter_model.safetensors",
    "reconstruction_mlp",
    "alignment_mlp",
]


def fetch_checkpoint(hub_id: str, options: LoadOptions, *, asked_for: str | None = None) -> Path:
    """Download a checkpoint, or find it in the hub cache.

    Args:
        hub_id: Repository on the hub.
        options: Revision, token and cache.
        asked_for: What the user wrote, if that was another name.

    Returns:
        Directory of the files.

    Raises:
        CheckpointError: If it cannot be had; names id, revision and the built-in names.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=options.revision,
                token=options.token,
                cache_dir=options.cache_folder,
                local_files_only=options.local_files_only,
                allow_patterns=_FILES,
            )
        )
    except Exception as error:  # The hub client raises its own errors, the HTTP library's, and the system's.
        named = "" if asked_for in (None, hub_id) else f"{asked_for!r} stands for "
        raise CheckpointError(
            f"{named}{hub_id!r} (revision {options.revision or 'default'}): there is no such directory here, and the "
            f"Hugging Face hub or its local cache did not give it either: {type(error).__name__}: {error}\n"
            f"Names that need no hub: {_built_in()}; names of checkpoints on the hub: {_on_hub()}."
        ) from error


def _built_in() -> str:
    return ", ".join(model.name for model in KNOWN_MODELS if model.hub_id is None)


def _on_hub() -> str:
    return ", ".join(model.name for model in KNOWN_MODELS if model.hub_id is not None)
