"""LLM2VecGenLoss: all terms on one forward pass of the student, through one copy of the LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from llm2vec_gen_st.losses.alignment import AlignReduction, alignment_loss
from llm2vec_gen_st.losses.cross_entropy import check_lm_logits
from llm2vec_gen_st.losses.margin import MARGIN_THRESHOLD, margin_loss
from llm2vec_gen_st.losses.reconstruction import reconstruction_loss
from llm2vec_gen_st.modules import ResponseHead, SuffixTransformer
from llm2vec_gen_st.modules.lora import lora_enabled


class LLM2VecGenLoss(nn.Module):
    """``recon_weight * L_recon + align_weight * L_align + margin_weight * L_margin`` (paper, section 3 and Table 10).

    Requirements:
        1. The model is an :class:`~llm2vec_gen_st.LLM2VecGen`.
        2. Batches come from :class:`~llm2vec_gen_st.training.StudentCollator`, which tokenizes responses as targets.

    Inputs:
        +-----------------------------------------------------+-----------------------------------------+
        | Columns                                             | Label                                   |
        +=====================================================+=========================================+
        | (query, response)                                   | teacher's embedding of the response (D) |
        +-----------------------------------------------------+-----------------------------------------+
        | (query, response, negative_query)                   | the same                                |
        +-----------------------------------------------------+-----------------------------------------+
        | (query, response, negative_query, negative_response)| those of both responses                 |
        +-----------------------------------------------------+-----------------------------------------+

    Args:
        model: The student.
        recon_weight: Weight of the reconstruction; with 0 that pass is not run.
        align_weight: Weight of the alignment; with 0 no teacher is needed.
        align_reduction: ``mean`` over D (the authors' code) or ``sum`` (the paper's formula).
        chunk: Positions whose vocabulary logits exist at once.
        margin_weight: Weight of the margin to hard negatives; with 0 none are needed.
        margin_threshold: The margin, a distance.

    Relations:
        ``recon_weight=0`` is an embedding distillation like :class:`sentence_transformers.losses.MSELoss`, on what the
        LLM would answer instead of on the text itself.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> LLM2VecGenLoss(tiny_model(), recon_weight=0.5).get_config_dict()["recon_weight"]
        0.5
    """

    def __init__(
        self,
        model: SentenceTransformer,
        recon_weight: float = 1.0,
        align_weight: float = 1.0,
        align_reduction: AlignReduction = "mean",
        chunk: int = 128,
        margin_weight: float = 0.0,
        margin_threshold: float = MARGIN_THRESHOLD,
    ) -> None:
        super().__init__()
        if recon_weight < 0 or align_weight < 0 or recon_weight + align_weight == 0:
            raise ValueError(
                f"recon_weight {recon_weight} and align_weight {align_weight} must not be negative, nor both 0."
            )
        if margin_weight < 0 or margin_threshold <= 0:
            raise ValueError(
                f"margin_weight {margin_weight} must not be negative, and margin_threshold {margin_threshold} must be "
                "above 0."
            )
        if align_reduction not in ("mean", "sum"):
            raise ValueError(f"align_reduction must be 'mean' or 'sum', got {align_reduction!r}.")
        self.model = model
        self.recon_weight = recon_weight
        self.align_weight = align_weight
        self.align_reduction: AlignReduction = align_reduction
        self.chunk = chunk
        self.margin_weight = margin_weight
        self.margin_threshold = margin_threshold
        if recon_weight:
            check_lm_logits(_parts(model)[0].llm)

    def forward(
        self, sentence_features: Sequence[dict[str, Any]], labels: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The weighted terms.

        Args:
            sentence_features: Features of the queries, and of the responses if the reconstruction has weight; with
                fewer responses than queries only the first queries are reconstructed. Behind the B queries may stand K
                hard negatives; ``negative_of`` (K) then holds the row of the query that each belongs to. They may hold
                ``mean_rows``, ``mean_tokens`` and ``mean_negatives``: what to divide by when batches are accumulated.
            labels: Teacher embeddings, if the alignment has weight: (B, D), or (B + K, D) to align the negatives with
                their own responses too.

        Returns:
            ``reconstruction``, ``alignment`` and ``margin``, those with weight; their sum is the loss.
        """
        query = sentence_features[0]
        transformer, head = _parts(self.model)
        # Through the whole (perhaps wrapped) model, so that distributed engines see the forward pass.
        features = self.model({key: query[key] for key in ("input_ids", "attention_mask")})
        embeddings, negative_of = features["sentence_embedding"], query.get("negative_of")
        count = len(embeddings) - (0 if negative_of is None else len(negative_of))
        losses: dict[str, torch.Tensor] = {}
        if self.recon_weight:
            response = sentence_features[1]
            tokens = response.get("mean_tokens")
            with lora_enabled(transformer.llm, False):
                loss = reconstruction_loss(
                    transformer.llm,
                    head.soft_prompt(features["compression_states"][: len(response["input_ids"])]),
                    response["input_ids"],
                    response["attention_mask"],
                    chunk=self.chunk,
                    tokens=None if tokens is None else float(tokens),
                )
            losses["reconstruction"] = self.recon_weight * loss
        if self.align_weight:
            if labels is None:
                raise ValueError("The alignment loss needs a label column with the teacher's embeddings.")
            # The authors add the negatives' own mean: both are divided by the number of queries.
            losses["alignment"] = self.align_weight * alignment_loss(
                embeddings if len(labels) == len(embeddings) else embeddings[:count],
                labels,
                reduction=self.align_reduction,
                rows=float(query.get("mean_rows", count)),
            )
        if self.margin_weight:
            if negative_of is None:
                raise ValueError("The margin loss needs hard negatives: a column 'negative_query'.")
            negatives = query.get("mean_negatives")
            losses["margin"] = self.margin_weight * margin_loss(
                embeddings[negative_of],
                embeddings[count:],
                threshold=self.margin_threshold,
                rows=None if negatives is None else float(negatives),
            )
        return losses

    def get_config_dict(self) -> dict[str, Any]:
        """Weights, reduction and margin, for the model card."""
        return {
            "recon_weight": self.recon_weight,
            "align_weight": self.align_weight,
            "align_reduction": self.align_reduction,
            "margin_weight": self.margin_weight,
            "margin_threshold": self.margin_threshold,
        }

    @property
    def citation(self) -> str:
        """BibTeX of the method."""
        return (
            "@misc{llm2vecgen2026,\n"
            "    title = {LLM2Vec-Gen: Generative Embeddings from Large Language Models},\n"
            "    year = {2026},\n"
            "    eprint = {2603.10913},\n"
            "    archivePrefix = {arXiv},\n"
            "}"
        )


def _parts(model: nn.Module) -> tuple[SuffixTransformer, ResponseHead]:
    """The student's two modules, also inside a distributed or compiled wrapper."""
    transformer = next((module for module in model.modules() if isinstance(module, SuffixTransformer)), None)
    head = next((module for module in model.modules() if isinstance(module, ResponseHead)), None)
    if transformer is None or head is None:
        raise ValueError(f"{type(model).__name__} is not an LLM2VecGen student: it has no suffix or no response head.")
    return transformer, head
