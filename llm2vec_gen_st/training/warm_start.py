"""A start near the goal: suffix rows from a text, heads by ridge regression on the frozen LLM's states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from llm2vec_gen_st.backbone import embedding_weight
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.training.processes import spread
from llm2vec_gen_st.training.standardized import StandardizedLinear

_HELD_OUT_SHARE = 0.1
_HELD_OUT_MOST = 2000
_STRENGTHS = tuple(10.0**power for power in np.arange(-4.0, 1.01, 0.5))


@dataclass(frozen=True)
class RidgeReport:
    """How well the closed-form heads do on rows they were not fitted on.

    Args:
        strength: The chosen regularisation, relative to the mean feature variance.
        held_out_loss: Their squared error as a share of that of the mean embedding (1.0 = knows nothing).
        rows: Rows used.
    """

    strength: float
    held_out_loss: float
    rows: int


def suffix_from_text(model: LLM2VecGen, text: str) -> None:
    """Set the suffix to the token embeddings of a text: its last m + n tokens, repeated if it is shorter.

    Args:
        model: The student.
        text: What is to stand behind every query.
    """
    transformer = model.suffix_transformer
    ids = transformer.text_tokenizer.ids(text, add_special_tokens=False).ids
    if not ids:
        raise ValueError("The suffix text has no tokens.")
    length = transformer.suffix_length
    while len(ids) < length:
        ids = ids + ids
    weight = embedding_weight(transformer.llm)
    rows = transformer.llm.get_input_embeddings()(torch.tensor(ids[-length:], device=weight.device))
    transformer.suffix.data.copy_(rows.detach().float())


@torch.no_grad()
def mean_states(
    model: LLM2VecGen, texts: Sequence[str], *, batch_size: int = 64, progress: bool = True
) -> torch.Tensor:
    """Mean compression state of each text, the input of the folded heads; processes share the work.

    Args:
        model: The student.
        texts: N inputs, instruction included.
        batch_size: Texts at once.
        progress: Whether a progress bar is shown.

    Returns:
        (N, H) float32 on the CPU.
    """

    def embed(share: list[str]) -> np.ndarray:
        return _mean_states(model, share, batch_size, progress).numpy()

    return torch.from_numpy(spread(texts, embed))


def _mean_states(model: LLM2VecGen, texts: Sequence[str], batch_size: int, progress: bool) -> torch.Tensor:
    transformer = model.suffix_transformer
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    result = torch.zeros(len(texts), model.response_head.hidden_size)
    for start in tqdm(range(0, len(texts), batch_size), desc="features", unit="batch", disable=not progress):
        rows = order[start : start + batch_size]
        features = transformer.preprocess([texts[row] for row in rows])
        features = {key: value.to(model.device) for key, value in features.items()}
        result[rows] = transformer(features)["compression_states"].mean(dim=1).cpu()
    return result


@torch.no_grad()
def state_moments(
    model: LLM2VecGen, texts: Sequence[str], *, most: int = 1000, batch_size: int = 64, progress: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (H) of the compression states of some texts, each position counted.

    Args:
        model: The student.
        texts: Inputs, instruction included.
        most: Texts used.
        batch_size: Texts at once.
        progress: Whether a progress bar is shown.
    """
    transformer, rows = model.suffix_transformer, sorted(texts[:most], key=len)
    found = []
    for first in tqdm(range(0, len(rows), batch_size), desc="moments", unit="batch", disable=not progress):
        features = transformer.preprocess(rows[first : first + batch_size])
        features = {key: value.to(model.device) for key, value in features.items()}
        found.append(transformer(features)["compression_states"].flatten(0, 1))
    states = torch.cat(found)
    return states.mean(dim=0), states.std(dim=0).clamp_min(1e-6)


def ridge_heads(
    model: LLM2VecGen, texts: Sequence[str], labels: np.ndarray, *, seed: int = 0, progress: bool = True
) -> RidgeReport:
    """Set both heads in closed form: MLP_recon a multiple of the identity, MLP_align as in :func:`ridge_alignment`.

    The multiple brings compression states to the scale of the LLM's input embeddings, so that soft prompts start as
    something the LLM can read.

    Args:
        model: The student; its suffix must be set already.
        texts: N inputs, instruction included.
        labels: Teacher embeddings (N, D).
        seed: Seed of the split.
        progress: Whether a progress bar is shown.

    Returns:
        What was chosen, and how good it is.
    """
    head = model.response_head
    if head.mlp_recon is None:
        raise ValueError("A ridge start needs both heads; this student has no MLP_recon.")
    states = mean_states(model, texts, progress=progress)
    scale = float(embedding_weight(model.llm).float().std() / states.std())
    with torch.no_grad():
        head.mlp_recon.weight.copy_(scale * torch.eye(head.hidden_size))
        head.mlp_recon.bias.zero_()
    return _fit_alignment(model, states, labels, seed)


def ridge_alignment(
    model: LLM2VecGen, texts: Sequence[str], labels: np.ndarray, *, seed: int = 0, progress: bool = True
) -> RidgeReport:
    """Set MLP_align in closed form for the suffix and MLP_recon as they are.

    The embedding is affine in ``mean(h)``, so the best one has a closed form: ridge regression of the teacher's
    embeddings on the standardized mean compression states, its strength chosen on a tenth of the rows. MLP_align is
    what MLP_recon leaves to be done of it. Arguments and result as :func:`ridge_heads`.

    Raises:
        ValueError: If a head is missing, or MLP_recon has lost what the regression needs.
    """
    return _fit_alignment(model, mean_states(model, texts, progress=progress), labels, seed)


@torch.no_grad()
def ridge_map(
    states: torch.Tensor, labels: np.ndarray, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, RidgeReport]:
    """The affine map from states to labels of least squared error, ridge-regularised on standardized states.

    Args:
        states: (N, H).
        labels: (N, D).
        seed: Seed of the split on whose smaller part the strength is chosen.

    Returns:
        Weight (D, H) and bias (D) in float64, and what was chosen.

    Raises:
        ValueError: If there are fewer than three rows.

    Example:
        >>> states = torch.randn(200, 3)
        >>> weight, bias, report = ridge_map(states, (2 * states[:, :1] + 1).numpy())
        >>> torch.allclose(states @ weight[0].float() + bias[0].float(), 2 * states[:, 0] + 1, atol=1e-2)
        True
    """
    if len(states) < 3:
        raise ValueError(f"A ridge regression needs three rows or more, got {len(states)}; start with init='random'.")
    targets = torch.as_tensor(labels).double()
    states = states.double()
    order = torch.as_tensor(np.random.default_rng(seed).permutation(len(states)))
    held = min(_HELD_OUT_MOST, max(1, int(len(states) * _HELD_OUT_SHARE)))
    test, fit = order[:held], order[held:]
    center, spread = states[fit].mean(dim=0), states[fit].std(dim=0).clamp_min(1e-9)
    features = (states - center) / spread
    goal = targets[fit].mean(dim=0)
    gram = features[fit].T @ features[fit] / len(fit)
    cross = features[fit].T @ (targets[fit] - goal) / len(fit)
    baseline = (targets[test] - goal).square().sum()
    tried = []
    for strength in _STRENGTHS:
        weight = torch.linalg.solve(gram + strength * torch.eye(len(gram), dtype=gram.dtype), cross)
        loss = (features[test] @ weight + goal - targets[test]).square().sum() / baseline
        tried.append((float(loss), float(strength), weight))
    loss, strength, weight = min(tried, key=lambda item: item[0])
    folded = (weight / spread[:, None]).T
    return folded, goal - folded @ center, RidgeReport(strength, loss, len(states))


@torch.no_grad()
def _fit_alignment(model: LLM2VecGen, states: torch.Tensor, labels: np.ndarray, seed: int) -> RidgeReport:
    head = model.response_head
    if head.mlp_recon is None or head.mlp_align is None:
        raise ValueError("A ridge regression sets MLP_align behind MLP_recon; this student lacks one of them.")
    weight, bias, report = ridge_map(states, labels, seed=seed)
    set_folded(model, weight, bias, states.mean(dim=0))
    return report


@contextmanager
def reconstruction_only(model: LLM2VecGen, texts: Sequence[str], *, progress: bool = True) -> Iterator[None]:
    """Let a block train MLP_recon alone: on standardized states, and without any change to the embeddings.

    Args:
        model: The student.
        texts: Inputs to take the states' mean and deviation of.
        progress: Whether a progress bar is shown.
    """
    head = model.response_head
    if head.mlp_recon is None:
        raise ValueError("This student has no MLP_recon to train.")
    folded = None if head.mlp_align is None else head.folded()
    mean, std = state_moments(model, texts, progress=progress)
    layer = StandardizedLinear(head.mlp_recon, mean, std)
    # Training code takes the layer by weight and bias, which both forms have.
    head._modules["mlp_recon"] = layer
    try:
        yield
    finally:
        head.mlp_recon = layer.folded()
    if folded is not None:
        weight, bias = folded
        set_folded(model, weight, bias, mean)


@torch.no_grad()
def set_folded(model: LLM2VecGen, weight: torch.Tensor, bias: torch.Tensor, center: torch.Tensor) -> None:
    """Choose MLP_align so that behind MLP_recon, as it is, both heads together are a given map.

    Args:
        model: The student.
        weight: (D, H) of ``embedding = weight @ mean(h) + bias``.
        bias: (D).
        center: (H), a typical ``mean(h)``, where the rounding of MLP_align to float32 is to do nothing.

    Raises:
        ValueError: If a head is missing, or MLP_recon maps different states onto each other.
    """
    head = model.response_head
    if head.mlp_recon is None or head.mlp_align is None:
        raise ValueError("MLP_align is set behind MLP_recon; this student lacks one of them.")
    weight, bias, center = (value.detach().cpu().double() for value in (weight, bias, center))
    recon, shift = (value.detach().cpu().double() for value in (head.mlp_recon.weight, head.mlp_recon.bias))
    head.mlp_align.weight.copy_(torch.linalg.solve(recon.T, weight.T).T.float())
    align = head.mlp_align.weight.cpu().double()
    head.mlp_align.bias.copy_((weight @ center + bias - align @ (recon @ center + shift)).float())
    found = align @ recon
    if (found - weight).norm() > 1e-3 * weight.norm():
        raise ValueError("MLP_recon maps different states onto each other, so MLP_align cannot be set behind it.")
