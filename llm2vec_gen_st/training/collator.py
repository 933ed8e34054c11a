"""Rows to tensors: queries as the student reads them, responses as reconstruction targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from llm2vec_gen_st.modules import SuffixTransformer
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.training.data import LABEL, NEGATIVE_LABEL, NEGATIVE_QUERY


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
        """Build the batch: ``query_*``, ``response_*`` and ``label``.

        Hard negatives, of rows that have one, stand behind the queries, and their labels behind the others.
        """
        batch: dict[str, Any] = {}
        negative_of = [number for number, row in enumerate(rows) if row.get(NEGATIVE_QUERY)]
        texts = [row["query"] for row in rows] + [rows[number][NEGATIVE_QUERY] for number in negative_of]
        batch.update({f"query_{key}": value for key, value in self.transformer.preprocess(texts).items()})
        if NEGATIVE_QUERY in rows[0]:
            batch["query_negative_of"] = torch.tensor(negative_of, dtype=torch.long)
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
            labels = [row[LABEL] for row in rows]
            if NEGATIVE_LABEL in rows[0]:
                labels += [rows[number][NEGATIVE_LABEL] for number in negative_of]
            batch["label"] = torch.stack([torch.as_tensor(label, dtype=torch.float32) for label in labels])
        return batch
