"""Rows to tensors: queries as the student reads them, responses as reconstruction targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from llm2vec_gen_st.modules import SuffixTransformer
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.training.data import LABEL


@dataclass
class StudentCollator:
    """Tokenize a batch by column names (rows of :func:`~llm2vec_gen_st.training.data.student_rows`).

    Args:
        transformer: The student's first module.
        max_response_tokens: Longest reconstruction target; longer ones lose their end.
        recon_share: Share of each batch, at least one row, whose responses are reconstructed; 0 for none. These are the
            batch's first rows.
    """

    transformer: SuffixTransformer
    max_response_tokens: int = 512
    recon_share: float = 1.0
    valid_label_columns: list[str] = field(default_factory=lambda: [LABEL])

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Build the batch: ``query_*``, ``response_*`` and ``label``."""
        batch: dict[str, Any] = {}
        query = self.transformer.preprocess([row["query"] for row in rows])
        batch.update({f"query_{key}": value for key, value in query.items()})
        if self.recon_share > 0:
            chosen = rows[: max(1, round(self.recon_share * len(rows)))]
            targets = self.transformer.response_ids(
                [row["response"] for row in chosen],
                self.max_response_tokens,
                # A response that was broken off has no end to learn.
                ended=[row.get("flag") != "cut_off" for row in chosen],
            )
            batch.update({f"response_{key}": value for key, value in pad_right(targets).items()})
        if LABEL in rows[0]:
            batch["label"] = torch.stack([torch.as_tensor(row[LABEL], dtype=torch.float32) for row in rows])
        return batch
