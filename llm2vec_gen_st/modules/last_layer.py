"""The last layer of an LLM, computed only at the positions whose hidden states are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from llm2vec_gen_st.backbone import decoder_layers

# Parts of a decoder layer that treat every position by itself. Keys and values are still needed of all.
_POSITION_WISE = ("self_attn.q_proj", "self_attn.o_proj", "mlp")


@dataclass
class _Asked:
    """Positions (b, n) of rows that are ``width`` positions long, and the part that is computing them just now."""

    positions: torch.Tensor
    width: int
    within: nn.Module | None = None


# Of one thread: another one may run the same LLM for something else meanwhile.
_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)


def prepare_last_layer(llm: PreTrainedModel) -> None:
    """Make the LLM's last layer heed :func:`only_at`; outside of that it does what it did.

    An LLM whose layers have none of the parts known here is left alone. Doing it again changes nothing.

    Args:
        llm: The causal LM.
    """
    for name, part in (part for layer in decoder_layers(llm)[-1:] for part in layer.named_modules()):
        if name in _POSITION_WISE and not getattr(part, "_heeds_positions", False):
            part._heeds_positions = True
            part.register_forward_pre_hook(_narrow)
            part.register_forward_hook(_widen)


@contextmanager
def only_at(positions: torch.Tensor, width: int) -> Iterator[None]:
    """While this lasts, hidden states of an LLM behind its last layer are right at some positions only.

    The LLM must have gone through :func:`prepare_last_layer`. With gradients nothing changes: backward may run a
    layer again when this is over.

    Args:
        positions: Positions (b, n) within the input; cached tokens before it do not count.
        width: Positions of the input.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> llm, ids = tiny_backbone().llm, torch.tensor([[5, 6, 7, 8]])
        >>> prepare_last_layer(llm)
        >>> whole = llm.base_model(input_ids=ids).last_hidden_state
        >>> with torch.no_grad(), only_at(torch.tensor([[1, 3]]), 4):
        ...     some = llm.base_model(input_ids=ids).last_hidden_state
        >>> torch.allclose(some[:, [1, 3]], whole[:, [1, 3]], atol=1e-6), torch.allclose(some[:, 0], whole[:, 0])
        (True, False)
    """
    token = _asked.set(None if torch.is_grad_enabled() else _Asked(positions, width))
    try:
        yield
    finally:
        _asked.reset(token)


def _heeded(inputs: tuple[Any, ...]) -> _Asked | None:
    # A compiled layer is made for one state of things; it computes all positions.
    return None if torch.compiler.is_compiling() or not inputs else _asked.get()


def _narrow(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    asked = _heeded(inputs)
    # A layer that LoRA has been put around is inside a part of the same name.
    if asked is None or asked.within is not None:
        return None
    asked.within = part
    states, *others = inputs
    index = asked.positions.to(states.device)[..., None].expand(-1, -1, states.shape[-1])
    return (states.gather(1, index), *others)


def _widen(part: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    asked = _heeded(inputs)
    if asked is None or asked.within is not part:
        return None
    asked.within = None
    if isinstance(output, tuple):
        return (_spread(output[0], asked), *output[1:])
    return _spread(output, asked)


def _spread(states: torch.Tensor, asked: _Asked) -> torch.Tensor:
    """States (b, n, ...) at their positions among zeros, (b, width, ...)."""
    index = asked.positions.to(states.device)[..., None].expand_as(states)
    return states.new_zeros(len(states), asked.width, states.shape[-1]).scatter(1, index, states)
