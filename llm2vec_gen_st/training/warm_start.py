"""A start near the goal: suffix rows from a text, heads by ridge regression on the frozen LLM's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from llm2vec_gen_st.backbone import embedding_weight
from llm2vec_gen_st.model import LLM2VecGen

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
    """Mean compression state of each text, the input of the folded heads.

    Args:
        model: The student.
        texts: N inputs, instruction included.
        batch_size: Texts at once.
        progress: Whether a progress bar is shown.

    Returns:
        (N, H) float32 on the CPU.
    """
    transformer = model.suffix_transformer
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    result = torch.zeros(len(texts), model.response_head.hidden_size)
    for start in tqdm(range(0, len(texts), batch_size), desc="features", unit="batch", disable=not progress):
        rows = order[start : start + batch_size]
        features = transformer.preprocess([texts[row] for row in rows])
        features = {key: value.to(model.device) for key, value in features.items()}
        result[rows] = transformer(features)["compression_states"].mean(dim=1).cpu()
    return result


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
def _fit_alignment(model: LLM2VecGen, states: torch.Tensor, labels: np.ndarray, seed: int) -> RidgeReport:
    head = model.response_head
    if head.mlp_recon is None or head.mlp_align is None:
        raise ValueError("A ridge regression sets MLP_align behind MLP_recon; this student lacks one of them.")
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
    recon = head.mlp_recon.weight.cpu().double()
    align = torch.linalg.solve(recon.T, folded.T).T
    # folded(h) = align(recon(h)), so the bias makes up for the mean state and for MLP_recon's own bias.
    bias = goal - folded @ center - align @ head.mlp_recon.bias.cpu().double()
    head.mlp_align.weight.copy_(align.float())
    head.mlp_align.bias.copy_(bias.float())
    found = head.align(head.soft_prompt(states[test].float().to(head.mlp_align.weight.device))).cpu().double()
    if (found - features[test] @ weight - goal).square().sum() > 1e-4 * baseline:
        raise ValueError("MLP_recon maps different states onto each other, so MLP_align cannot be fitted behind it.")
    return RidgeReport(strength, loss, len(states))
