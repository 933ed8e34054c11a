"""Training InBedder (Peng et al. 2024): abstractive question answering with LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.inbedder import InBedderLLM
from llm2vec_gen_st.baselines.llm_module import as_backbone
from llm2vec_gen_st.baselines.training import (
    RUN_FOLDER,
    LoraSettings,
    StageSettings,
    check_rows,
    dataset_of,
    fit,
    module_of,
    require_trainer,
    rows_digest,
    settings_of,
    training_run,
)
from llm2vec_gen_st.losses.cross_entropy import check_lm_logits, chunked_cross_entropy, lm_logits

COLUMNS = ("text", "question", "answer")
QA_STAGE = StageSettings(steps=1000, batch_size=32, learning_rate=1e-4, warmup_steps=30)


@dataclass
class AnswerCollator:
    """Rows of text, question and answer to tensors; the answer's positions are the pooled ones.

    Args:
        module: The InBedder module.
        max_answer_tokens: Longest answer.
    """

    module: InBedderLLM
    max_answer_tokens: int = 64
    valid_label_columns: list[str] = field(default_factory=list)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Build the batch: ``answer_input_ids``, ``answer_attention_mask``, ``answer_pool_mask``."""
        laid_out = [
            self.module.answered(row["text"], row["question"], row["answer"], self.max_answer_tokens) for row in rows
        ]
        return {f"answer_{key}": value for key, value in self.module.as_features(laid_out).items()}


class AnswerLoss(nn.Module):
    """Mean cross entropy of the answers' tokens after text and question.

    Args:
        model: An InBedder encoder.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model
        check_lm_logits(module_of(model).llm)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Any = None) -> torch.Tensor:
        """Loss of one batch of :class:`AnswerCollator`."""
        (features,) = sentence_features
        module = module_of(self.model)
        ids = features["input_ids"]
        with module.own_pass():
            hidden = module.hidden_states(ids, features["attention_mask"].sum(dim=1))
            predicted = features["pool_mask"][:, 1:].bool()
            states = hidden[:, :-1][predicted.to(hidden.device)]
            wanted = ids[:, 1:][predicted].to(hidden.device)
            total = chunked_cross_entropy(states, wanted, lambda part: lm_logits(module.llm, part).to(part.device))
        return total / max(1, len(wanted))


def train_inbedder(
    base: str | Backbone,
    rows: Sequence[Mapping[str, str]],
    output_dir: str | Path,
    *,
    stage: StageSettings = QA_STAGE,
    lora: LoraSettings | None = None,
    max_answer_tokens: int = 64,
    model_kwargs: dict[str, Any] | None = None,
    progress: bool = True,
) -> SentenceTransformer:
    """Train InBedder on abstractive question answering and save it; the same call again goes on.

    Args:
        base: The LLM: hub id, directory, or loaded backbone without LoRA layers.
        rows: ``text``, ``question`` and (short, free) ``answer`` each.
        output_dir: Where the encoder goes; ``training/`` inside it holds settings and log.
        stage: Settings of the trainer.
        lora: LoRA layers; rank 16 on all linear layers if not given.
        max_answer_tokens: Longest answer, its end included.
        model_kwargs: Passed on when the base model is loaded.
        progress: Whether a progress bar is shown.

    Returns:
        The encoder; :func:`~llm2vec_gen_st.baselines.inbedder` loads it again.

    Raises:
        ValueError: If a row lacks a field (names it), there are too few rows, or the folder holds another run.
    """
    require_trainer()
    check_rows(rows, COLUMNS, filled=("answer",))
    output = Path(output_dir)
    backbone = as_backbone(base, model_kwargs)
    depends_on = {
        "rows_sha256": rows_digest(rows, COLUMNS),
        "stage": settings_of(stage),
        "max_answer_tokens": max_answer_tokens,
    }
    with training_run(
        output,
        InBedderLLM,
        backbone,
        lora or LoraSettings(),
        seed=stage.seed,
        depends_on=depends_on,
        model_kwargs=model_kwargs,
    ) as (model, module):
        collator = AnswerCollator(module, max_answer_tokens)
        columns = dataset_of(rows, COLUMNS)
        fit(model, columns, AnswerLoss(model), stage, output / RUN_FOLDER, collator=collator, progress=progress)
    return model
