"""A start near the goal: suffix rows from a text, heads by ridge regression on the frozen LLM's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

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
    embedding = transformer.llm.get_input_embeddings()
    rows = embedding(torch.tensor(ids[-length:], device=embedding.weight.device))
    transformer.suffix.data.copy_(rows.detach().float())


@torch.inference_mode()
def mean_states(model: LLM2VecGen, texts: Sequence[str], *, batch_size: int = 64, progress: bool = True) -> torch.Tensor:
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
    """Set both heads to the ridge regression of the teacher's embeddings on the mean compression states.

    The folded head is affine in ``mean(h)``, so the best one has a closed form. It is factored into MLP_recon, a
    multiple of the identity that brings states to the scale of the LLM's input embeddings, and MLP_align, the rest.
    The strength is chosen on a tenth of the rows.

    Args:
        model: The student; its suffix must be set already.
        texts: N inputs, instruction included.
        labels: Teacher embeddings (N, D).
        seed: Seed of the split.
        progress: Whether a progress bar is shown.

    Returns:
        What was chosen, and how good it is.
    """
    states = mean_states(model, texts, progress=progress).double()
    targets = torch.as_tensor(labels).double()
    order = torch.as_tensor(np.random.default_rng(seed).permutation(len(states)))
    held = min(_HELD_OUT_MOST, max(1, int(len(states) * _HELD_OUT_SHARE)))
    test, fit = order[:held], order[held:]
    center, spread = states[fit].mean(dim=0), states[fit].std(dim=0).clamp_min(1e-6)
    features = (states - center) / spread
    goal = targets[fit].mean(dim=0)
    gram = features[fit].T @ features[fit] / len(fit)
    cross = features[fit].T @ (targets[fit] - goal) / len(fit)
    baseline = (targets[test] - goal).square().sum()
    tried = []
    for strength in _STRENGTHS:
        weight = torch.linalg.solve(gram + strength * torch.eye(len(gram), dtype=gram.dtype), cross)
        loss = (features[test] @ weight + goal - targets[test]).square().sum() / baseline
        tried.append((float(loss), strength, weight))
    loss, strength, weight = min(tried, key=lambda item: item[0])
    head = model.response_head
    if head.mlp_recon is None or head.mlp_align is None:
        raise ValueError("A ridge start needs both heads.")
    scale = float(model.llm.get_input_embeddings().weight.float().std() / states.std())
    folded = (weight / spread[:, None]).T
    device = head.mlp_recon.weight.device
    with torch.no_grad():
        head.mlp_recon.weight.copy_(scale * torch.eye(head.hidden_size, device=device))
        head.mlp_recon.bias.zero_()
        head.mlp_align.weight.copy_((folded / scale).to(device, torch.float32))
        head.mlp_align.bias.copy_((goal - folded @ center).to(device, torch.float32))
    return RidgeReport(strength, loss, len(states))
