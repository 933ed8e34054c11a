"""What a result depends on besides the task: the model's weights and settings, and the libraries."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.lora import lora_parameters

_LIBRARIES = ("llm2vec-gen-st", "mteb", "sentence-transformers", "transformers", "torch", "scikit-learn", "numpy")

# Some modules list a whole vocabulary.
_LONGEST_SETTINGS = 4000


def describe_model(model: SentenceTransformer) -> dict[str, Any]:
    """Everything of a model that its embeddings depend on, apart from instructions.

    Args:
        model: A student, or any other SentenceTransformer.

    Returns:
        ``base`` (reference of a student's frozen LLM, or ``None``), ``adapter`` (digest of all other weights, in full),
        ``modules`` (classes and settings), ``dtype``, ``max_seq_length``, ``truncate_dim``, ``similarity`` and
        ``parameters`` (how many).

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> describe_model(tiny_model())["dtype"]
        ['float32']
    """
    base: dict[str, Any] | None = None
    frozen: set[int] = set()
    if isinstance(model, LLM2VecGen):
        reference = model.suffix_transformer.base
        base = {"id": reference.id, "revision": reference.revision, "fingerprint": reference.fingerprint}
        if reference.fingerprint is not None:
            frozen = {id(weight) for weight in model.llm.state_dict(keep_vars=True).values()}
            frozen -= {id(weight) for weight in lora_parameters(model.llm).values()}
    weights = {name: value for name, value in model.state_dict(keep_vars=True).items() if id(value) not in frozen}
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters()}
    return {
        "base": base,
        "adapter": digest_of(weights.items()),
        "modules": [_settings(module) for module in model],
        "dtype": sorted(dtypes),
        "max_seq_length": model.max_seq_length,
        "truncate_dim": model.truncate_dim,
        "similarity": None if model.similarity_fn_name is None else str(model.similarity_fn_name),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of named tensors, every value of them.

    Args:
        tensors: Names and tensors of any shape and dtype.

    Returns:
        16 hexadecimal digits.

    Example:
        >>> digest_of([("a", torch.zeros(2))]) == digest_of([("a", torch.tensor([0.0, 1e-9]))])
        False
    """
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.device.type != "meta":
            values = tensor.detach().cpu().contiguous().reshape(-1)
            found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digest_of_json(value: Any) -> str:
    """Digest of a JSON value, whatever the order of its keys.

    Example:
        >>> digest_of_json({"a": 1, "b": 2}) == digest_of_json({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def library_versions() -> dict[str, str]:
    """Versions of the libraries that scores depend on; ``not installed`` for a source tree without metadata."""
    return {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Settings that a module may keep without saving them: plain values, and the keys of parts that have one."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        plain = value if isinstance(value, str | int | float) else getattr(value, "key", None)
        if not name.startswith("_") and name != "training" and isinstance(plain, str | int | float):
            found[name] = plain
    return found


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    settings: dict[str, Any] = {**getattr(module, "get_config_dict", dict)(), **_attributes(module)}
    for name, child in module.named_children():
        if isinstance(child, SentenceTransformer):  # a model inside, with prompts of its own
            settings[name] = {
                "modules": [_settings(part) for part in child],
                "prompts": child.prompts,
                "default_prompt_name": child.default_prompt_name,
                "truncate_dim": child.truncate_dim,
            }
    # A setting that JSON cannot hold stands for itself by its class only: its text may hold an address.
    text = json.dumps(settings, sort_keys=True, default=lambda value: type(value).__qualname__)
    found = json.loads(text) if len(text) <= _LONGEST_SETTINGS else {"digest": digest_of_json(text)}
    return {"class": f"{type(module).__module__}.{type(module).__qualname__}", "settings": found}
