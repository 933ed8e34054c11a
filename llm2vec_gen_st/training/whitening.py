"""Evening out what MLP_align gives: a student sure of little crowds into the few directions that it is sure of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.training.warm_start import mean_states


@torch.no_grad()
def whitening_map(
    vectors: torch.Tensor, strength: float, *, shrinkage: float = 0.1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric linear map that evens out the spread of vectors along their principal axes, and their mean.

    Args:
        vectors: (N, D).
        strength: Power of the standard deviation that an axis is divided by: 0 changes nothing, 1 is full whitening.
        shrinkage: Share of the mean variance that is added to each axis, so that noise does not become large.

    Returns:
        The map (D, D) and the mean (D), in float64.

    Raises:
        ValueError: If there are fewer than two vectors.

    Example:
        >>> vectors = torch.randn(500, 2) * torch.tensor([4.0, 1.0])
        >>> weight, mean = whitening_map(vectors, 1.0, shrinkage=0.0)
        >>> torch.allclose(torch.cov(((vectors.double() - mean) @ weight.T).T), torch.eye(2).double(), atol=1e-6)
        True
    """
    if len(vectors) < 2:
        raise ValueError(f"Whitening needs two vectors or more, got {len(vectors)}.")
    vectors = vectors.double()
    mean = vectors.mean(dim=0)
    centred = vectors - mean
    variances, axes = torch.linalg.eigh(centred.T @ centred / (len(vectors) - 1))
    # Rounding makes variances of nothing slightly negative.
    variances = variances.clamp_min(0) + shrinkage * variances.mean()
    return axes @ torch.diag(variances.clamp_min(1e-12) ** (-strength / 2)) @ axes.T, mean


@torch.no_grad()
def whiten_alignment(model: LLM2VecGen, texts: Sequence[str], strength: float, *, progress: bool = True) -> None:
    """Fold a centred whitening of the student's vectors into MLP_align; soft prompts stay as they are.

    A least-squares student gives each direction of the teacher's space a spread in proportion to how well it predicts
    it, so cosines are decided by few directions. This evens them out, in closed form and without labels.

    Args:
        model: The student.
        texts: N inputs, instruction included, on which mean and spread are measured.
        strength: As in :func:`whitening_map`.
        progress: Whether a progress bar is shown.

    Raises:
        ValueError: If the student has no MLP_align.
    """
    head = model.response_head
    if head.mlp_align is None:
        raise ValueError("Whitening is folded into MLP_align, which this student does not have.")
    weight, bias = head.folded()
    states = mean_states(model, texts, progress=progress)
    vectors = states.double() @ weight.cpu().double().T + bias.cpu().double()
    even, mean = whitening_map(vectors, strength)
    align = head.mlp_align
    align.weight.copy_(even @ align.weight.cpu().double())
    align.bias.copy_(even @ (align.bias.cpu().double() - mean))
