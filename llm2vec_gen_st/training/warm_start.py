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
    """Set both heads in closed form: MLP_recon a multiple of the identity, MLP_align by :func:`ridge_alignment`.

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
    """Set MLP_align to the ridge regression of the teacher's embeddings on the mean soft prompts.

    The embedding is affine in the mean soft prompt, so the best alignment for given suffix and MLP_recon has a closed
    form. Its strength is chosen on a tenth of the rows. Arguments and result as :func:`ridge_heads`.
    """
    return _fit_alignment(model, mean_states(model, texts, progress=progress), labels, seed)


@torch.no_grad()
def _fit_alignment(model: LLM2VecGen, states: torch.Tensor, labels: np.ndarray, seed: int) -> RidgeReport:
    head = model.response_head
    if head.mlp_align is None:
        raise ValueError("A ridge regression needs a head to set; this student has no MLP_align.")
    device = head.mlp_align.weight.device
    prompts = head.soft_prompt(states.to(device)).cpu().double()
    targets = torch.as_tensor(labels).double()
    order = torch.as_tensor(np.random.default_rng(seed).permutation(len(prompts)))
    held = min(_HELD_OUT_MOST, max(1, int(len(prompts) * _HELD_OUT_SHARE)))
    test, fit = order[:held], order[held:]
    center, spread = prompts[fit].mean(dim=0), prompts[fit].std(dim=0).clamp_min(1e-9)
    features = (prompts - center) / spread
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
    align = (weight / spread[:, None]).T
    head.mlp_align.weight.copy_(align.float())
    head.mlp_align.bias.copy_((goal - align @ center).float())
    return RidgeReport(strength, loss, len(prompts))
