"""The two linear heads: compression states to a soft prompt, to the embedding of the response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import Module
from torch import nn
from typing_extensions import Self

from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.config import check_fields, find_file, read_json_object
from llm2vec_gen_st.modules.tensors import CheckpointError, load_tensors, save_tensors

WEIGHTS_FILE = "model.safetensors"

_CONFIG = {
    "hidden_size": "a whole number",
    "embedding_dim": "a whole number",
    "reconstruction": "a boolean",
    "alignment": "a boolean",
}


class ResponseHead(Module):
    """Project compression states to the soft prompt and on to the response's embedding (paper, section 3).

    ``soft prompt = reconstruction(h)``, ``embedding = mean over n of alignment(soft prompt)``. Both maps are affine,
    so for the embedding alone they are applied once to the mean of ``h``: the same value for 1/n of the work.
    Kept and computed in float32 or better whatever the LLM's dtype, also when the model is cast or runs under autocast:
    the two maps may be large and undo each other, which rounded ones would not.

    Args:
        hidden_size: Width H of the compression states.
        embedding_dim: Width D of the embedding (the teacher's), ignored without alignment.
        reconstruction: Whether MLP_recon (H to H) exists.
        alignment: Whether MLP_align (H to D) exists; without it D = H.

    Example:
        >>> head = ResponseHead(hidden_size=8, embedding_dim=4)
        >>> out = head({"compression_states": torch.zeros(2, 3, 8)})
        >>> tuple(out["sentence_embedding"].shape)
        (2, 4)
    """

    def __init__(
        self, hidden_size: int, embedding_dim: int, *, reconstruction: bool = True, alignment: bool = True
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding_dim = embedding_dim if alignment else hidden_size
        self.mlp_recon: nn.Linear | None = nn.Linear(hidden_size, hidden_size) if reconstruction else None
        self.mlp_align: nn.Linear | None = nn.Linear(hidden_size, embedding_dim) if alignment else None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move as any module does, but stay in float32."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        applied: Self = super()._apply(kept, recurse)
        return applied

    def get_config_dict(self) -> dict[str, Any]:
        """The constructor's arguments, as saved."""
        return {
            "hidden_size": self.hidden_size,
            "embedding_dim": self.embedding_dim,
            "reconstruction": self.mlp_recon is not None,
            "alignment": self.mlp_align is not None,
        }

    def soft_prompt(self, states: torch.Tensor) -> torch.Tensor:
        """MLP_recon of the compression states.

        Args:
            states: (..., H).

        Returns:
            (..., H) in float32.
        """
        states = states.float()
        return states if self.mlp_recon is None else _affine(self.mlp_recon, states)

    def align(self, soft_prompt: torch.Tensor) -> torch.Tensor:
        """MLP_align of a soft prompt, or of its mean.

        Args:
            soft_prompt: (..., H).

        Returns:
            (..., D) in float32.
        """
        soft_prompt = soft_prompt.float()
        return soft_prompt if self.mlp_align is None else _affine(self.mlp_align, soft_prompt)

    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both heads as one affine map of the mean compression state.

        Returns:
            Weight (D, H) and bias (D), in float32.
        """
        bias = self._precise(torch.zeros(self.hidden_size, device=self._device()))
        basis = torch.eye(self.hidden_size, device=self._device())
        return (self._precise(basis) - bias).T.float().contiguous(), bias.float()

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``sentence_embedding`` (B, D) to the features.

        Args:
            features: Holds ``compression_states`` (B, n, H).
            **kwargs: Not used.

        Returns:
            The features.
        """
        mean = features["compression_states"].to(self._device()).float().mean(dim=1)
        if torch.is_grad_enabled():
            features["sentence_embedding"] = self.align(self.soft_prompt(mean))
        else:
            features["sentence_embedding"] = self._precise(mean).float()
        return features

    def _precise(self, value: torch.Tensor) -> torch.Tensor:
        """Both heads in float64 (where the device has it): they may be large and undo each other."""
        value = value.to(torch.float32 if value.device.type == "mps" else torch.float64)
        for layer in self._layers().values():
            value = nn.functional.linear(value, layer.weight.to(value), layer.bias.to(value))
        return value

    def get_embedding_dimension(self) -> int:
        """Width D of the embedding."""
        return self.embedding_dim

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write config and weights; always as safetensors."""
        self.save_config(output_path)
        save_tensors(Path(output_path) / WEIGHTS_FILE, self._tensors())

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Self:
        """Read a saved head; see :meth:`sentence_transformers.base.modules.Module.load`.

        Raises:
            CheckpointError: If config or weights file do not hold exactly what this head saves.
        """
        options = LoadOptions.among(kwargs)
        config_path = find_file(cls, model_name_or_path, cls.config_file_name, subfolder, options)
        config = read_json_object(config_path)
        check_fields(str(config_path), config, _CONFIG)
        try:
            # Sizes are compared with the file before any memory is taken.
            with torch.device("meta"):
                head = cls(**config)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{config_path}: no head can be made of this: {error}") from error
        found = head._read(find_file(cls, model_name_or_path, WEIGHTS_FILE, subfolder, options))
        head.to_empty(device="cpu")
        head._assign(found)
        return head

    def load_weights(self, path: str | Path) -> None:
        """Replace the weights by those of a saved head of the same form."""
        self._assign(self._read(path))

    def _read(self, path: str | Path) -> dict[str, torch.Tensor]:
        return load_tensors(path, {name: tuple(tensor.shape) for name, tensor in self._tensors().items()})

    def _assign(self, found: Mapping[str, torch.Tensor]) -> None:
        for name, layer in self._layers().items():
            weight, bias = found[f"{name}.weight"], found[f"{name}.bias"]
            if isinstance(layer, nn.Linear):
                layer.load_state_dict({"weight": weight, "bias": bias})
            else:
                layer.assign(weight.to(layer.weight), bias.to(layer.weight))

    def _layers(self) -> dict[str, Any]:
        layers = {"mlp_recon": self.mlp_recon, "mlp_align": self.mlp_align}
        return {name: layer for name, layer in layers.items() if layer is not None}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What is saved: weight and bias of each layer, also of one that training keeps in another form."""
        return {
            f"{name}.{kind}": getattr(layer, kind)
            for name, layer in self._layers().items()
            for kind in ("weight", "bias")
        }

    def _device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.parameters()), None)


def _affine(layer: nn.Linear, value: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    kind = value.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return nn.functional.linear(value, layer.weight.float(), bias)
