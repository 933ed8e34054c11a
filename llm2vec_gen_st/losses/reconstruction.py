"""L_recon: the soft prompt alone must make the frozen LLM write the response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from llm2vec_gen_st.backbone import decoder_layers, embedding_weight
from llm2vec_gen_st.losses.cross_entropy import chunked_cross_entropy, lm_logits
from llm2vec_gen_st.modules.attention import quick_backward
from llm2vec_gen_st.modules.groups import similar_lengths, tokens_at_once
from llm2vec_gen_st.products import quick_products

GROUP_TOKENS = 2048
"""Tokens whose activations exist at once on an accelerator."""


class _GroupedLoss(torch.autograd.Function):
    """Sum of the rows' losses; the gradient of the soft prompts is taken while a group's activations exist."""

    @staticmethod
    def forward(
        ctx: Any,
        soft_prompt: torch.Tensor,
        loss_of: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
        groups: Sequence[Sequence[int]],
        learning: bool,
    ) -> torch.Tensor:
        total = soft_prompt.new_zeros((), dtype=torch.float32)
        gradient = torch.zeros_like(soft_prompt) if learning else None
        for rows in groups:
            part = soft_prompt[rows].detach().requires_grad_(learning)
            with torch.set_grad_enabled(learning):
                loss = loss_of(part, rows)
            if gradient is not None:
                # The LLM is frozen, so this reaches nothing else.
                loss.backward()
                assert part.grad is not None
                gradient[rows] = part.grad
            total += loss.detach().to(total.device)
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.gradient * grad_outputs[0], None, None, None


def reconstruction_loss(
    llm: PreTrainedModel,
    soft_prompt: torch.Tensor,
    response_ids: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    chunk: int = 128,
    tokens: float | None = None,
) -> torch.Tensor:
    """Mean cross entropy of the responses' tokens given their soft prompts (paper, section 3).

    The LLM reads the n soft-prompt vectors and then the response; the last soft-prompt position predicts the first
    token. Rows are padded on the right, so causal attention needs no mask. Logits exist only at response positions.
    Only the soft prompts learn from this, so rows are run forward and backward in groups of similar length, and
    backward from the result only scales what is then known: memory grows with a group, not with the batch.

    Args:
        llm: The frozen causal LM.
        soft_prompt: (B, n, H).
        response_ids: (B, R), right-padded, each ending with its end-of-response token.
        response_mask: (B, R), 1 for tokens.
        chunk: Positions whose logits exist at once.
        tokens: Divide by this number of tokens instead of the batch's own (for accumulated batches).

    Returns:
        Scalar in float32.
    """
    lengths = response_mask.sum(dim=1).tolist()
    embed = llm.get_input_embeddings()

    def loss_of(prompt: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        width = max(lengths[row] for row in rows)
        ids, mask = response_ids[rows, :width], response_mask[rows, :width].bool()
        response = embed(ids)
        # The last token of a row predicts nothing, so the longest row's last column is left out.
        inputs = torch.cat([prompt.to(response.device, response.dtype), response[:, :-1]], dim=1)
        with _checkpointed_layers(llm):
            hidden = llm.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        predicting = hidden[:, prompt.shape[1] - 1 :]
        mask, ids = mask.to(predicting.device), ids.to(predicting.device)
        return chunked_cross_entropy(predicting[mask], ids[mask], lambda part: lm_logits(llm, part), chunk=chunk)

    # A response without any token, broken off at once, predicts nothing.
    rows = [row for row, length in enumerate(lengths) if length]
    sizes = [lengths[row] + soft_prompt.shape[1] for row in rows]
    groups = [
        [rows[place] for place in group]
        for group in similar_lengths(sizes, tokens_at_once(soft_prompt.device, GROUP_TOKENS))
    ]
    learning = soft_prompt.requires_grad and torch.is_grad_enabled()
    # Around the groups' backward passes too: layers that compute their activations again do so there.
    with quick_backward(embedding_weight(llm)), quick_products():
        total: torch.Tensor = _GroupedLoss.apply(soft_prompt, loss_of, groups, learning)
    # Nothing to predict is no loss.
    return total / ((sum(lengths) if tokens is None else tokens) or 1)


@contextmanager
def _checkpointed_layers(llm: PreTrainedModel) -> Iterator[None]:
    """Let layers recompute their activations if gradient checkpointing is enabled on the LLM.

    The host checkpoints a layer only while that layer is in training mode; the LLM stays in evaluation mode (no
    dropout), so only the layers' own flags are switched, not those of what is inside them.
    """
    layers = decoder_layers(llm)
    for layer in layers:
        layer.training = layer.gradient_checkpointing and torch.is_grad_enabled()
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
