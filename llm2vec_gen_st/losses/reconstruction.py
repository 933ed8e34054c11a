"""L_recon: the soft prompt alone must make the frozen LLM write the response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from llm2vec_gen_st.losses.cross_entropy import chunked_cross_entropy, lm_logits


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
    embed = llm.get_input_embeddings()
    response = embed(response_ids)
    prompt = soft_prompt.to(response.device, response.dtype)
    # The last token of a row predicts nothing, so the longest row's last column is left out.
    inputs = torch.cat([prompt, response[:, :-1]], dim=1)
    with _checkpointed_layers(llm):
        hidden = llm.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    predicting = hidden[:, prompt.shape[1] - 1 :]
    mask = response_mask.bool().to(predicting.device)
    total = chunked_cross_entropy(
        predicting[mask], response_ids.to(predicting.device)[mask], lambda part: lm_logits(llm, part), chunk=chunk
    )
    return total / (mask.sum() if tokens is None else tokens)


@contextmanager
def _checkpointed_layers(llm: PreTrainedModel) -> Iterator[None]:
    """Let layers recompute their activations if gradient checkpointing is enabled on the LLM.

    The host checkpoints a layer only while that layer is in training mode; the LLM stays in evaluation mode (no
    dropout), so only the layers' own flags are switched, not those of what is inside them.
    """
    layers = [module for module in llm.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = layer.gradient_checkpointing and torch.is_grad_enabled()
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
