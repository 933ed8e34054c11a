"""Held-out queries during training: does a query's embedding find the response the LLM would give?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from llm2vec_gen_st.losses import reconstruction_loss
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.lora import lora_enabled
from llm2vec_gen_st.training.collator import StudentCollator


class ResponseRetrievalEvaluator(SentenceEvaluator):
    """Share of queries whose nearest teacher embedding is that of their own response (R@1), and the distance.

    Args:
        queries: N held-out queries, instruction included.
        labels: Teacher embeddings (N, D) of their responses.
        name: Put before the names of the metrics.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> evaluator = ResponseRetrievalEvaluator(["who makes honey?"], np.ones((1, 48), np.float32), name="held_out")
        >>> evaluator(tiny_model())["held_out_response_recall_at_1"]
        1.0
    """

    def __init__(self, queries: Sequence[str], labels: np.ndarray, name: str = "") -> None:
        super().__init__()
        self.queries = list(queries)
        self.labels = torch.as_tensor(labels)
        self.name = name
        self.primary_metric = f"{name}_response_recall_at_1" if name else "response_recall_at_1"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Measure a student.

        Returns:
            ``response_recall_at_1``, and ``relative_distance``: the squared distance to the teacher as a share of that
            of the mean teacher embedding; behind the evaluator's name.
        """
        assert isinstance(model, LLM2VecGen)
        found = torch.as_tensor(model.encode(self.queries, batch_size=64, prompt=""))
        normal = torch.nn.functional.normalize
        nearest = (normal(found, dim=1) @ normal(self.labels, dim=1).T).argmax(dim=1)
        hits = (nearest == torch.arange(len(nearest))).float().mean()
        spread = (self.labels - self.labels.mean(dim=0)).square().sum()
        metrics = {
            "response_recall_at_1": float(hits),
            "relative_distance": float((found - self.labels).square().sum() / spread.clamp_min(1e-12)),
        }
        return {f"{self.name}_{key}" if self.name else key: value for key, value in metrics.items()}


def held_out_evaluators(
    queries: Sequence[str], labels: np.ndarray, prompts: Sequence[str]
) -> list[ResponseRetrievalEvaluator]:
    """Response retrieval on held-out queries, once behind each of a recipe's instructions.

    Args:
        queries: N held-out queries.
        labels: Teacher embeddings (N, D) of their responses.
        prompts: The instructions.

    Returns:
        Evaluators ``held_out_0``, ``held_out_1``, and so on.
    """
    return [
        ResponseRetrievalEvaluator([prompt + query for query in queries], labels, f"held_out_{number}")
        for number, prompt in enumerate(prompts)
    ]


def own_response_recall(model: LLM2VecGen, queries: Sequence[str], responses: Sequence[str]) -> float:
    """Share of queries that find their own response among all, both embedded by the student: no teacher is needed.

    Args:
        model: The student.
        queries: N queries, instruction included.
        responses: Their responses, the documents' instruction included.

    Returns:
        R@1 by cosine, from 0 to 1.
    """
    normal = torch.nn.functional.normalize
    one, two = (
        normal(torch.as_tensor(model.encode(list(texts), batch_size=64, prompt="")), dim=1)
        for texts in (queries, responses)
    )
    nearest = (one @ two.T).argmax(dim=1)
    return float((nearest == torch.arange(len(nearest))).float().mean())


@torch.no_grad()
def reconstruction_per_token(
    model: LLM2VecGen, rows: Sequence[dict[str, Any]], *, max_response_tokens: int = 512, batch_size: int = 16
) -> float:
    """L_recon of rows in nats a token: how well the soft prompts tell the LLM what to write.

    Args:
        model: The student.
        rows: ``query`` (instruction included), ``response`` and perhaps ``flag``.
        max_response_tokens: Longest target.
        batch_size: Rows at once.
    """
    model.eval()
    collator = StudentCollator(model.suffix_transformer, max_response_tokens)
    total = tokens = 0.0
    for start in range(0, len(rows), batch_size):
        batch = {key: value.to(model.device) for key, value in collator(list(rows[start : start + batch_size])).items()}
        query = {key: batch[f"query_{key}"] for key in ("input_ids", "attention_mask")}
        states = model.suffix_transformer(query)["compression_states"]
        count = float(batch["response_attention_mask"].sum())
        with lora_enabled(model.llm, False):
            loss = reconstruction_loss(
                model.llm,
                model.response_head.soft_prompt(states),
                batch["response_input_ids"],
                batch["response_attention_mask"],
            )
        total, tokens = total + float(loss) * count, tokens + count
    return total / tokens
