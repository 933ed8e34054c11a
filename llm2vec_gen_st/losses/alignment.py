"""L_align: squared distance between the student's embedding and the teacher's embedding of the response."""

from __future__ import annotations

from typing import Literal

import torch

AlignReduction = Literal["mean", "sum"]


def alignment_loss(
    student: torch.Tensor, teacher: torch.Tensor, *, reduction: AlignReduction = "mean", rows: float | None = None
) -> torch.Tensor:
    """Squared L2 distance, averaged over rows (paper, section 3).

    Args:
        student: (B, D).
        teacher: (B, D).
        reduction: ``sum`` over D, as the paper writes it, or ``mean`` over D, as the authors' code does.
        rows: Divide by this number of rows instead of B (for accumulated batches).

    Returns:
        Scalar.

    Example:
        >>> float(alignment_loss(torch.ones(2, 4), torch.zeros(2, 4), reduction="sum"))
        4.0
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"Student embeddings have shape {tuple(student.shape)}, teacher embeddings {tuple(teacher.shape)}; "
            "create the student with embedding_dim equal to the teacher's dimension."
        )
    squares = (student.float() - teacher.to(student.device).float()).square()
    per_row = squares.sum(dim=1) if reduction == "sum" else squares.mean(dim=1)
    return per_row.sum() / (len(per_row) if rows is None else rows)
