"""Cross entropy over a large vocabulary, a chunk of positions at a time, for a frozen LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from llm2vec_gen_st.backbone import embedding_weight

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of token losses; the gradient of the hidden states is taken while a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, labels: torch.Tensor, logits_of: LogitsFunction, chunk: int
    ) -> torch.Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden) if hidden.requires_grad else None
        for start in range(0, len(hidden), chunk):
            part = hidden[start : start + chunk].detach().requires_grad_(gradient is not None)
            with torch.set_grad_enabled(gradient is not None):
                logits = logits_of(part).float()
            row = torch.arange(len(part), device=logits.device)
            target = labels[start : start + chunk].to(logits.device)
            scores = logits.detach().log_softmax(dim=-1)
            total -= scores[row, target].sum().to(total.device)
            if gradient is not None:
                # What autograd would give for the logits, without its three further copies of them.
                difference = scores.exp_()
                difference[row, target] -= 1
                (gradient[start : start + chunk],) = torch.autograd.grad(logits, part, difference)
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        return (ctx.gradient * grad_outputs[0] if ctx.gradient is not None else None), None, None, None


def chunked_cross_entropy(
    hidden: torch.Tensor, labels: torch.Tensor, logits_of: LogitsFunction, *, chunk: int = 128
) -> torch.Tensor:
    """Sum of token-level cross entropies without ever holding the logits of more than one chunk.

    Args:
        hidden: Hidden states (N, H) at the positions that predict.
        labels: The tokens to predict (N).
        logits_of: Maps (k, H) to logits (k, V); its own weights get no gradient.
        chunk: Positions whose logits exist at once; memory is ``chunk * V``.

    Returns:
        Scalar in float32.

    Example:
        >>> hidden, labels = torch.zeros(3, 2), torch.tensor([0, 1, 1])
        >>> round(float(chunked_cross_entropy(hidden, labels, torch.nn.Linear(2, 4, bias=False), chunk=2)), 4)
        4.1589
    """
    result: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, labels, logits_of, chunk)
    return result


def lm_logits(llm: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of hidden states through the LLM's head, with the scalings and caps some families apply after it.

    Args:
        llm: The causal LM.
        hidden: (..., H) after the final norm.

    Returns:
        (..., V).
    """
    head = llm.get_output_embeddings()
    logits: torch.Tensor = head(hidden.to(head.weight.device))
    config = llm.config.get_text_config()
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def check_lm_logits(llm: PreTrainedModel) -> None:
    """Refuse an LLM whose logits are not what :func:`lm_logits` computes from its last hidden state.

    Raises:
        ValueError: If they differ; the family then applies something after its head that is not known here.
    """
    ids = torch.zeros(1, 1, dtype=torch.long, device=embedding_weight(llm).device)
    hidden = llm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    expected = llm(input_ids=ids, use_cache=False).logits.float()
    found = lm_logits(llm, hidden).float().to(expected.device)
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(llm).__name__} applies something after its LM head that is not known here, so the reconstruction "
            "loss would be wrong. Train it with recon_weight=0, or report the model family."
        )
