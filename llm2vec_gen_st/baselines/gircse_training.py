"""Training GIRCSE (Tsai et al. 2025): a contrastive loss after every soft token, never worse than before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from torch.nn import functional

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.gircse import GIRCSELLM
from llm2vec_gen_st.baselines.llm_module import as_backbone
from llm2vec_gen_st.baselines.training import (
    RUN_FOLDER,
    LoraSettings,
    StageSettings,
    check_rows,
    dataset_of,
    fit,
    require_trainer,
    rows_digest,
    settings_of,
    training_run,
)
from llm2vec_gen_st.losses.cross_entropy import check_lm_logits

COLUMNS = ("anchor", "positive")
CONTRASTIVE_STAGE = StageSettings(steps=1000, batch_size=32, learning_rate=1e-4, warmup_steps=100)

_SMALLEST = 1e-8


class StepwiseContrastiveLoss(nn.Module):
    """InfoNCE after each soft token, and a penalty where one more token makes it worse.

    With L_k the contrastive loss of the means over the first k soft tokens, the loss is
    ``mean_k L_k + weight * mean_k max(0, log L_{k+1} - log L_k)``.

    Args:
        model: A GIRCSE encoder.
        temperature: Divides the cosines.
        refinement_weight: Weight of the penalty.
    """

    def __init__(
        self, model: SentenceTransformer, *, temperature: float = 0.02, refinement_weight: float = 1.0
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.refinement_weight = refinement_weight

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Any = None) -> torch.Tensor:
        """Loss of one batch of anchors and positives."""
        anchors, positives = (self.model(features)["soft_states"] for features in sentence_features)
        return self.from_steps(self.step_losses(anchors, positives))

    def step_losses(self, anchors: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
        """InfoNCE (K) of the running means of soft states (B, K, H)."""
        steps = torch.arange(1, anchors.shape[1] + 1, device=anchors.device)[:, None]
        first, second = (functional.normalize(states.cumsum(dim=1) / steps, dim=-1) for states in (anchors, positives))
        scores = torch.einsum("akh,bkh->kab", first, second) / self.temperature
        wanted = torch.arange(len(anchors), device=anchors.device)
        return torch.stack([functional.cross_entropy(step, wanted) for step in scores])

    def from_steps(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss, from the losses (K) of the steps."""
        logs = torch.log(losses + _SMALLEST)
        worse = functional.relu(logs[1:] - logs[:-1])
        penalty = worse.mean() if len(worse) else losses.new_zeros(())
        return losses.mean() + self.refinement_weight * penalty


def train_gircse(
    base: str | Backbone,
    rows: Sequence[Mapping[str, str]],
    output_dir: str | Path,
    *,
    soft_tokens: int = 5,
    temperature: float = 0.02,
    refinement_weight: float = 1.0,
    stage: StageSettings = CONTRASTIVE_STAGE,
    lora: LoraSettings | None = None,
    prompts: Mapping[str, str] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    progress: bool = True,
) -> SentenceTransformer:
    """Train GIRCSE on pairs and save it; the same call again goes on where a stopped one was.

    Args:
        base: The LLM: hub id, directory, or loaded backbone without LoRA layers.
        rows: ``anchor`` and ``positive`` each; the other positives of a batch are the negatives. Instructions, if any,
            are part of the texts.
        output_dir: Where the encoder goes; ``training/`` inside it holds settings and log.
        soft_tokens: K.
        temperature: Divides the cosines.
        refinement_weight: Weight of the penalty on steps that make it worse.
        stage: Settings of the trainer.
        lora: LoRA layers; rank 16 on all linear layers if not given.
        prompts: Instructions by name, saved with the encoder.
        model_kwargs: Passed on when the base model is loaded.
        progress: Whether a progress bar is shown.

    Returns:
        The encoder; :func:`~llm2vec_gen_st.baselines.gircse` loads it again.

    Raises:
        ValueError: If a row lacks a field (names it), there are too few rows, the folder holds another run, or the
            stage asks for gradient checkpointing, which GIRCSE's key/value cache rules out.
    """
    if stage.gradient_checkpointing:
        raise ValueError(
            "GIRCSE cannot be trained with gradient checkpointing: its soft tokens read the text from a key/value "
            "cache, which layers that are run again do not have. Use a smaller batch_size or max_seq_length instead."
        )
    require_trainer()
    check_rows(rows, COLUMNS)
    output = Path(output_dir)
    backbone = as_backbone(base, model_kwargs)
    check_lm_logits(backbone.llm)
    depends_on = {
        "rows_sha256": rows_digest(rows, COLUMNS),
        "soft_tokens": soft_tokens,
        "temperature": temperature,
        "refinement_weight": refinement_weight,
        "stage": settings_of(stage),
    }
    with training_run(
        output,
        GIRCSELLM,
        backbone,
        lora or LoraSettings(),
        seed=stage.seed,
        depends_on=depends_on,
        prompts=prompts,
        model_kwargs=model_kwargs,
        soft_tokens=soft_tokens,
    ) as (model, _):
        loss = StepwiseContrastiveLoss(model, temperature=temperature, refinement_weight=refinement_weight)
        fit(model, dataset_of(rows, COLUMNS), loss, stage, output / RUN_FOLDER, progress=progress)
    return model
