"""LoRA weights on the backbone that belong to the student alone: on for its pass, off for everything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from llm2vec_gen_st.extras import require

ADAPTER = "student"

# The LLM is shared, and switching its adapters is a change of state: one pass at a time while adapters exist.
_switch = threading.RLock()


def add_lora(llm: nn.Module, config: Mapping[str, Any]) -> None:
    """Put LoRA layers into the backbone: in float32, trainable, and switched off.

    Like suffix and heads they belong to the student, so they require gradients from the start; the weights under
    them stay frozen.

    Args:
        llm: The causal LM.
        config: ``r``, ``lora_alpha``, ``lora_dropout`` and ``target_modules`` of ``peft.LoraConfig``.

    Raises:
        ValueError: If the backbone already carries the LoRA layers of another student, or ``target_modules`` name
            anything but linear layers of its blocks; the backbone is as before then.
    """
    peft = require("peft", extra="train", why="a checkpoint with LoRA layers")
    if lora_parameters(llm):
        raise ValueError(
            "This backbone already carries the LoRA layers of another student. Students with LoRA layers cannot share "
            "one; load the base model again."
        )
    settings = peft.LoraConfig(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        lora_dropout=config.get("lora_dropout", 0.0),
        target_modules=list(config["target_modules"]),
    )
    with lora_removed_on_failure(llm):
        peft.inject_adapter_in_model(settings, llm, adapter_name=ADAPTER)
        kept = {name.rpartition(".")[0] for name in lora_parameters(llm)}
        base = getattr(llm, "base_model", llm)
        unkept = [name for name, layer in _lora_layers(llm).items() if layer not in _modules_of(base, kept)]
        if unkept:
            raise ValueError(
                f"LoRA layers on {', '.join(unkept)} could not be saved: target_modules may name linear layers inside "
                "the LLM's blocks only, not its token embeddings or its head."
            )
    for parameter in lora_parameters(llm).values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    llm.eval()
    _enable(llm, False)


def lora_parameters(llm: nn.Module) -> dict[str, nn.Parameter]:
    """The LoRA matrices inside the backbone.

    Returns:
        Name, such as ``layers.0.self_attn.q_proj.lora_A``, to parameter.
    """
    found: dict[str, nn.Parameter] = {}
    base = getattr(llm, "base_model", llm)
    for name, parameter in base.named_parameters():
        for matrix in ("lora_A", "lora_B"):
            if f".{matrix}.{ADAPTER}." in name:
                found[name.split(f".{matrix}.")[0] + f".{matrix}"] = parameter
    return found


def load_lora(llm: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy saved LoRA matrices into the backbone's LoRA layers, by the names of :func:`lora_parameters`."""
    for name, parameter in lora_parameters(llm).items():
        parameter.data.copy_(tensors[name])


def remove_lora(llm: nn.Module) -> None:
    """Take the LoRA layers out of the backbone again; the modules under them were never changed."""
    for name, layer in _lora_layers(llm).items():
        parent, _, child = name.rpartition(".")
        setattr(llm.get_submodule(parent), child, layer.get_base_layer())
    if hasattr(llm, "peft_config"):
        del llm.peft_config


def _lora_layers(llm: nn.Module) -> dict[str, Any]:
    """The LoRA layers in the backbone, whatever they wrap, by name."""
    tuners = require("peft.tuners.tuners_utils", extra="train", why="a checkpoint with LoRA layers")
    return {name: module for name, module in llm.named_modules() if isinstance(module, tuners.BaseTunerLayer)}


def _modules_of(base: nn.Module, names: set[str]) -> list[nn.Module]:
    return [base.get_submodule(name) for name in names]


@contextmanager
def lora_removed_on_failure(llm: nn.Module | None) -> Iterator[None]:
    """Run a block that may put LoRA layers into a shared backbone; should it fail, they are taken out again.

    Args:
        llm: The causal LM; ``None`` if nobody shares it. LoRA layers that it carries already stay.
    """
    carried = llm is not None and bool(lora_parameters(llm))
    try:
        yield
    except BaseException:
        # Asked of the layers: peft itself leaves some, and no note of them, where it fails half way.
        if llm is not None and not carried and any(".lora_" in name for name, _ in llm.named_modules()):
            remove_lora(llm)
        raise


@torch.no_grad()
def weights_without_lora(module: nn.Module, *, merge: bool) -> dict[str, torch.Tensor]:
    """Weights of a backbone under their plain names, as if it had never carried LoRA layers.

    Args:
        module: The causal LM or its headless part; it is not changed.
        merge: Whether the LoRA matrices are added to copies of the weights they act on.

    Returns:
        Name to tensor.
    """
    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in module.state_dict().items()
        if ".lora_" not in name
    }
    if merge:
        layers = {name: layer for name, layer in module.named_modules() if ADAPTER in getattr(layer, "lora_A", {})}
        for name, layer in layers.items():
            weight = weights[f"{name}.weight"]
            added: torch.Tensor = layer.get_delta_weight(ADAPTER)
            weights[f"{name}.weight"] = (weight.float() + added.float()).to(weight.dtype)
    return weights


@contextmanager
def lora_enabled(llm: nn.Module, enabled: bool) -> Iterator[None]:
    """Run a block with the LLM's LoRA layers on or off; does nothing for one without any.

    A student without LoRA layers may share the LLM with one that has some, and run in another thread: it too has to
    wait until they are off.

    Args:
        llm: The causal LM.
        enabled: Whether the layers take part.
    """
    if not lora_parameters(llm):
        yield
        return
    with _switch:
        _enable(llm, enabled)
        try:
            yield
        finally:
            _enable(llm, False)


def _enable(llm: nn.Module, enabled: bool) -> None:
    """Switch the LoRA layers; peft would also freeze them when off, so what requires gradients is kept."""
    tuners = require("peft.tuners.tuners_utils", extra="train", why="a checkpoint with LoRA layers")
    trainable = {name: parameter.requires_grad for name, parameter in lora_parameters(llm).items()}
    for module in llm.modules():
        if isinstance(module, tuners.BaseTunerLayer):
            module.enable_adapters(enabled)
    for name, parameter in lora_parameters(llm).items():
        parameter.requires_grad_(trainable[name])
