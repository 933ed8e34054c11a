"""Held-out queries during training: does a query's embedding find the response the LLM would give?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from llm2vec_gen_st.model import LLM2VecGen


class ResponseRetrievalEvaluator(SentenceEvaluator):
    """Share of queries whose nearest teacher embedding is that of their own response (R@1), and the distance.

    Args:
        queries: N held-out queries, instruction included.
        labels: Teacher embeddings (N, D) of their responses.
    """

    def __init__(self, queries: Sequence[str], labels: np.ndarray) -> None:
        super().__init__()
        self.queries = list(queries)
        self.labels = torch.as_tensor(labels)
        self.primary_metric = "response_recall_at_1"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Measure a student.

        Returns:
            ``response_recall_at_1``, and ``relative_distance``: the squared distance to the teacher as a share of that
            of the mean teacher embedding.
        """
        assert isinstance(model, LLM2VecGen)
        found = torch.as_tensor(model.encode(self.queries, batch_size=64, prompt=""))
        normal = torch.nn.functional.normalize
        nearest = (normal(found, dim=1) @ normal(self.labels, dim=1).T).argmax(dim=1)
        hits = (nearest == torch.arange(len(nearest))).float().mean()
        spread = (self.labels - self.labels.mean(dim=0)).square().sum()
        return {
            "response_recall_at_1": float(hits),
            "relative_distance": float((found - self.labels).square().sum() / spread),
        }
