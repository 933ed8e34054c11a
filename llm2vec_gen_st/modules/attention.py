"""Which of torch's kernels computes attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

_SHORT = (torch.bfloat16, torch.float16)


@contextmanager
def quick_backward(states: torch.Tensor) -> Iterator[None]:
    """While this lasts, attention on a CPU in 16 bits is computed in a way whose backward pass is quick.

    The backward pass of the fused kernel, which torch prefers, takes several times as long there as that of plain
    matrix products (`benchmarks/speed/attention.py`). These stay in 16 bits as the LLM's other products do: float32
    would double what backward keeps. In float32, on other devices and without gradients nothing changes.

    Args:
        states: What goes into the LLM; tells device and number format.

    Example:
        >>> query = torch.ones(1, 2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
        >>> with quick_backward(query):
        ...     found = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        >>> "flash" in found.grad_fn.name().lower()
        False
    """
    if not (torch.is_grad_enabled() and states.device.type == "cpu" and states.dtype in _SHORT):
        yield
        return
    # A switch of all devices, whatever its module is called.
    kept_short = cuda.fp16_bf16_reduction_math_sdp_allowed()
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(bool(kept_short))
