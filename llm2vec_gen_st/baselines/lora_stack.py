"""Several LoRA adapters as one of their summed rank: exact, and the base model stays as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from llm2vec_gen_st.modules.config import check_fields, read_json_object
from llm2vec_gen_st.modules.lora import add_lora, load_lora, lora_parameters
from llm2vec_gen_st.modules.tensors import CheckpointError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

_NUMBERS = {"r": "a whole number", "lora_alpha": "a number"}
_REFUSED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Lora:
    """LoRA matrices: each weight W they act on becomes ``W + scaling * B @ A``.

    Args:
        tensors: Name, such as ``layers.0.self_attn.q_proj.lora_A``, to A (r, inputs) or B (outputs, r).
        scaling: The factor.
    """

    tensors: Mapping[str, torch.Tensor]
    scaling: float

    @property
    def layers(self) -> list[str]:
        """Names of the layers they act on."""
        return sorted(name.removesuffix(".lora_A") for name in self.tensors if name.endswith(".lora_A"))

    @property
    def rank(self) -> int:
        """Largest rank r."""
        return max(len(self.tensors[f"{layer}.lora_A"]) for layer in self.layers)

    @property
    def settings(self) -> dict[str, Any]:
        """What ``add_lora`` makes such layers of."""
        targets = sorted({layer.rpartition(".")[2] for layer in self.layers})
        return {"r": self.rank, "lora_alpha": self.scaling * self.rank, "target_modules": targets}


def stack(parts: Sequence[Lora], scaling: float = 1.0) -> Lora:
    """One set of matrices that acts as all parts together: ``Σ s_i B_i A_i = s [B_i s_i / s] [A_i]``.

    Args:
        parts: The adapters; a layer that one of them lacks gets zeros there.
        scaling: The factor s of the result.

    Example:
        >>> one = Lora({"q.lora_A": torch.ones(1, 2), "q.lora_B": torch.ones(2, 1)}, 2.0)
        >>> both = stack([one, one])
        >>> (both.tensors["q.lora_B"] @ both.tensors["q.lora_A"]).tolist()
        [[4.0, 4.0], [4.0, 4.0]]
    """
    layers = sorted({layer for part in parts for layer in part.layers})
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        name_a, name_b = f"{layer}.lora_A", f"{layer}.lora_B"
        inputs = next(part.tensors[name_a].shape[1] for part in parts if name_a in part.tensors)
        outputs = next(part.tensors[name_b].shape[0] for part in parts if name_b in part.tensors)
        rows, columns = [], []
        for part in parts:
            absent = name_a not in part.tensors
            rows.append(torch.zeros(part.rank, inputs) if absent else part.tensors[name_a].float())
            columns.append(
                torch.zeros(outputs, part.rank) if absent else part.tensors[name_b].float() * (part.scaling / scaling)
            )
        tensors[name_a], tensors[name_b] = torch.cat(rows), torch.cat(columns, dim=1)
    return Lora(tensors, scaling)


def lora_of(llm: nn.Module, settings: Mapping[str, Any]) -> Lora:
    """The LoRA matrices that a backbone carries now, copied.

    Args:
        llm: The causal LM.
        settings: What they were added with.
    """
    tensors = {name: parameter.detach().to("cpu").clone() for name, parameter in lora_parameters(llm).items()}
    return Lora(tensors, settings["lora_alpha"] / settings["r"])


def apply(llm: nn.Module, lora: Lora, where: str) -> None:
    """Copy matrices into the LoRA layers of a backbone that carries some of this form.

    Args:
        llm: The causal LM, after ``add_lora(llm, lora.settings)``.
        lora: The matrices.
        where: Where they come from, for the message.

    Raises:
        CheckpointError: If a layer is missing on either side, or has another shape.
    """
    carried = {name: tuple(parameter.shape) for name, parameter in lora_parameters(llm).items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in lora.tensors.items()}
    differing = sorted(name for name in carried.keys() | wanted.keys() if carried.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{where}: {len(differing)} LoRA matrices do not fit the base model; the first is {name!r}, with shape "
            f"{wanted.get(name, 'none')} in the adapter and {carried.get(name, 'none')} in the base model."
        )
    load_lora(llm, lora.tensors)


def carry(llm: nn.Module, lora: Lora, where: str) -> dict[str, Any]:
    """Put matrices into a backbone without LoRA layers; returns the settings they were added with."""
    settings = lora.settings
    add_lora(llm, settings)
    apply(llm, lora, where)
    return settings


def read_adapter(folder: Path) -> tuple[Lora, str | None]:
    """Read a PEFT LoRA folder (``adapter_config.json``, ``adapter_model.safetensors``).

    Args:
        folder: The folder.

    Returns:
        The matrices, named from the headless LLM on, and the id of the base model that the adapter names.

    Raises:
        CheckpointError: If it is not a plain LoRA adapter, or its files are not what they should be.
    """
    path = folder / ADAPTER_CONFIG_FILE
    config = read_json_object(path)
    if str(config.get("peft_type")).upper() != "LORA":
        raise CheckpointError(f"{path}: peft_type {config.get('peft_type')!r} is not LORA.")
    used = [name for name in _REFUSED if config.get(name)]
    if used or config.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: LoRA options that cannot be read here: {', '.join(used or ['bias'])}.")
    check_fields(str(path), {name: config[name] for name in _NUMBERS if name in config}, _NUMBERS)
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    base = config.get("base_model_name_or_path")
    return Lora(_read_tensors(folder / ADAPTER_FILE, rank), scaling), base if isinstance(base, str) and base else None


def _read_tensors(path: Path, rank: int) -> dict[str, torch.Tensor]:
    try:
        found = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} could not be read as a safetensors file: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in found.items():
        # Adapters of a causal LM name the headless LLM inside it; those of a headless LLM start with its layers.
        name = key.removeprefix(_PREFIX).removeprefix("model.").removesuffix(".weight")
        matrix = name.rpartition(".")[2]
        if matrix not in ("lora_A", "lora_B") or tensor.ndim != 2:
            raise CheckpointError(f"{path}: the tensor {key!r} is not a LoRA matrix.")
        if tensor.shape[0 if matrix == "lora_A" else 1] != rank:
            raise CheckpointError(f"{path}: the tensor {key!r} has shape {tuple(tensor.shape)}, but r is {rank}.")
        tensors[name] = tensor
    layers = {name.rpartition(".")[0] for name in tensors}
    single = [layer for layer in sorted(layers) if not {f"{layer}.lora_A", f"{layer}.lora_B"} <= tensors.keys()]
    if not tensors or single:
        raise CheckpointError(f"{path}: no pairs of LoRA matrices" + (f" for {single[0]!r}." if single else "."))
    return tensors
