"""L_margin: embeddings of different queries, hard negatives among them, stay a distance apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.nn import functional

MARGIN_THRESHOLD = 10.0


def margin_loss(
    queries: torch.Tensor,
    negatives: torch.Tensor,
    *,
    threshold: float = MARGIN_THRESHOLD,
    rows: float | None = None,
) -> torch.Tensor:
    r"""Squared-distance margin loss with hard and in-batch negatives (paper, Table 10; threshold 10.0).

    .. math::
        L_{margin} = \frac{1}{K} \sum_i \frac{1}{N - 1} \sum_{x \neq \hat e_i}
            \max(0, \tau^2 - \lVert \hat e_i - x \rVert^2)

    where x runs over the N = 2K embeddings of the batch, those of all queries and of all negatives, in every process.
    The paper names loss and threshold; that the threshold is a distance, and squared, and that the candidates are
    these, is how the authors' code computes it. Teachers whose embeddings are of length 1 need a threshold below 2.

    Where a process group exists, embeddings are gathered from all its processes, with gradients, so each of them must
    call this; they may have different numbers of rows.

    Args:
        queries: The student's embeddings of K queries (K, D).
        negatives: Its embeddings of their hard negatives (K, D).
        threshold: The distance τ.
        rows: Divide by this number of queries instead of K (for accumulated batches).

    Returns:
        Scalar in float32; 0 if there are no queries.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> queries, negatives = torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0], [9.0]])
        >>> float(margin_loss(queries, negatives, threshold=2.0))  # (4 - 1) / 3 for the first, nothing for the other
        0.5
    """
    if queries.shape != negatives.shape:
        raise ValueError(
            f"Each query needs one hard negative; embeddings of queries have shape {tuple(queries.shape)}, those of "
            f"negatives {tuple(negatives.shape)}."
        )
    queries, negatives = queries.float(), negatives.float()
    everywhere, first = _gathered(torch.cat([queries, negatives], dim=1))
    candidates = torch.cat(everywhere.chunk(2, dim=1))
    squares = queries.square().sum(dim=1, keepdim=True) + candidates.square().sum(dim=1) - 2 * queries @ candidates.T
    lacking = functional.relu(threshold**2 - squares.clamp_min(0.0))
    own = torch.arange(len(queries), device=queries.device)
    others = torch.ones_like(lacking)
    others[own, first + own] = 0.0
    total = (lacking * others).sum() / max(1, len(candidates) - 1)
    return total / (max(1, len(queries)) if rows is None else max(1e-12, rows))


def _gathered(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows of all processes, with gradients, and where this one's start among them."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return rows, 0
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    counts = torch.zeros(processes, dtype=torch.long, device=rows.device)
    counts[rank] = len(rows)
    distributed.all_reduce(counts)
    sizes: list[int] = counts.tolist()
    # Collectives take tensors of one shape only.
    padded = functional.pad(rows, (0, 0, 0, max(sizes) - len(rows)))
    parts = _AllGather.apply(padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]), sum(sizes[:rank])


class _AllGather(torch.autograd.Function):
    """One tensor of every process; each gets back the sum of the gradients that all of them have for its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, tensor.contiguous())
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        total = grad_outputs[0].contiguous()
        distributed.all_reduce(total)
        return total[distributed.get_rank()]
