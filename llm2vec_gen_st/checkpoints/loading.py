"""From a name, a path or a hub id to the modules of a student."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sentence_transformers.util.misc import import_module_class
from torch import nn

from llm2vec_gen_st.backbone import packaged_smollm2
from llm2vec_gen_st.checkpoints.directory import (
    HOST_CONFIG_FILE,
    MODULES_FILE,
    OUR_MODULES,
    STOCK_MODULES,
    Form,
    read_modules,
    recognise,
)
from llm2vec_gen_st.checkpoints.hub import fetch_checkpoint
from llm2vec_gen_st.checkpoints.official import official_modules
from llm2vec_gen_st.checkpoints.registry import find_known
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules import ResponseHead, SuffixTransformer
from llm2vec_gen_st.modules.config import read_json_object
from llm2vec_gen_st.modules.tensors import CheckpointError

_OUR_CLASSES: dict[str, type[SuffixTransformer] | type[ResponseHead]] = {
    "SuffixTransformer": SuffixTransformer,
    "ResponseHead": ResponseHead,
}
_SAVED_SETTINGS = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Args:
        modules: The pipeline's modules, in order.
        config: Saved ``prompts``, ``default_prompt_name``, ``similarity_fn_name`` and ``truncate_dim``, where present.
    """

    modules: list[nn.Module]
    config: dict[str, Any] = field(default_factory=dict)


def load_checkpoint(name_or_path: str, options: LoadOptions) -> Checkpoint:
    """Load a student's modules and the one base model they share.

    Args:
        name_or_path: A built-in name, a name of the paper, a directory, or a hub id; tried in this order.
        options: How both are loaded.

    Returns:
        The modules and the saved settings.

    Raises:
        CheckpointError: If nothing is found, or its files are not what they should be.
        BaseModelError: If the base model is missing, or its weights are others.
    """
    known = find_known(name_or_path)
    if known is not None and known.folder is not None:
        directory = known.folder
        if not directory.is_dir():
            raise CheckpointError(
                f"The built-in model {known.name} is not part of this installation: {directory} is missing."
            )
        # The package that carries the base model holds 4-bit weights; those on the hub are close, but not the same.
        exact = packaged_smollm2() is not None or options.backbone is not None
        options = replace(options, verify_base=options.verify_base and exact)
    elif known is None and Path(name_or_path).is_dir():
        directory = Path(name_or_path)
    else:
        hub_id = known.hub_id if known is not None and known.hub_id is not None else name_or_path
        directory = fetch_checkpoint(hub_id, options, asked_for=name_or_path)
    if recognise(directory) is Form.OFFICIAL:
        return Checkpoint(official_modules(directory, options))
    return Checkpoint(_our_modules(directory, options), _saved_settings(directory))


def _our_modules(directory: Path, options: LoadOptions) -> list[nn.Module]:
    """The modules named in ``modules.json``: ours and the host's, never those of other packages."""
    modules: list[nn.Module] = []
    for reference, subfolder in read_modules(directory):
        place = (directory / subfolder).resolve()
        if not place.is_relative_to(directory.resolve()):
            raise CheckpointError(f"{directory / MODULES_FILE}: the path {subfolder!r} leaves the checkpoint.")
        if reference.startswith(OUR_MODULES):
            found = _OUR_CLASSES.get(reference.rpartition(".")[2])
            if found is None:
                raise CheckpointError(
                    f"{directory / MODULES_FILE}: the module {reference} is not known; update llm2vec-gen-st."
                )
            modules.append(found.load(str(directory), subfolder=subfolder, **vars(options)))
        elif reference.startswith(STOCK_MODULES):
            stock: Any = import_module_class(reference, str(directory))
            modules.append(stock.load(str(directory), subfolder=subfolder))
        else:
            raise CheckpointError(
                f"{directory / MODULES_FILE}: the module {reference} belongs to another package; load this model with "
                "SentenceTransformer(..., trust_remote_code=True) if you trust it."
            )
    return modules


def _saved_settings(directory: Path) -> dict[str, Any]:
    path = directory / HOST_CONFIG_FILE
    saved = read_json_object(path) if path.is_file() else {}
    return {key: saved[key] for key in _SAVED_SETTINGS if saved.get(key) is not None}
