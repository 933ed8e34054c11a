"""Hidden states to look at: those of the compression tokens, and those of plain text, at any layer of the LLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from llm2vec_gen_st.backbone import decoder_layers, embedding_weight
from llm2vec_gen_st.encoding import as_rows
from llm2vec_gen_st.modules.groups import similar_lengths
from llm2vec_gen_st.modules.lora import lora_enabled
from llm2vec_gen_st.modules.truncation import count_cut, warn_once_if_cut
from llm2vec_gen_st.products import quick_products

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen


def resolved_layer(llm: PreTrainedModel, layer: int) -> int:
    """A layer's number counted from the input.

    Args:
        llm: The causal LM, of L layers.
        layer: 0 for the input embeddings, 1 to L for the states after that layer, -1 for the last ones (the LM head's
            input, after the final norm), -2 for the layer before, and so on.

    Returns:
        A number from 0 to L.

    Raises:
        ValueError: If the LLM has no such layer.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> resolved_layer(tiny_backbone().llm, -1)
        2
    """
    count = int(llm.config.get_text_config().num_hidden_layers)
    if not -count - 1 <= layer <= count:
        raise ValueError(
            f"layer {layer}: this LLM has {count} layers, so its states are numbered from 0 (the input embeddings) to "
            f"{count}, or from -1 (the last) to {-count - 1}."
        )
    return layer % (count + 1)


def hidden_states(llm: PreTrainedModel, rows: torch.Tensor, layer: int) -> torch.Tensor:
    """States of one layer for rows of input embeddings, padded behind; causal attention alone keeps padding out.

    Args:
        llm: The causal LM.
        rows: Input embeddings (b, T, H).
        layer: As in :func:`resolved_layer`.

    Returns:
        (b, T, H).
    """
    number = resolved_layer(llm, layer)
    if number == resolved_layer(llm, -1):
        with quick_products():
            last: torch.Tensor = llm.base_model(inputs_embeds=rows, use_cache=False).last_hidden_state
        return last
    # What goes into the next layer. The host's own list of layers to keep has come to count from the input only lately.
    caught: list[torch.Tensor] = []
    here = threading.get_ident()

    def catch(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if threading.get_ident() == here:  # others may run the same LLM
            caught.append(inputs[0] if inputs else named["hidden_states"])

    hook = decoder_layers(llm.base_model)[number].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with quick_products():
            llm.base_model(inputs_embeds=rows, use_cache=False)
    finally:
        hook.remove()
    (states,) = caught
    return states


@torch.inference_mode()
def compression_states(
    model: LLM2VecGen,
    texts: str | Iterable[str],
    *,
    layer: int = -1,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> torch.Tensor:
    """Hidden states of the compression tokens (paper, section 3), in the pass that makes the embedding.

    Args:
        model: The student.
        texts: A string or any iterable of N strings.
        layer: As in :func:`resolved_layer`; the last layer's states are those that the embedding is made of.
        prompt_name: Name of the instruction.
        prompt: The instruction itself.

    Returns:
        (N, n, H) float32 on the CPU.

    Raises:
        TypeError: If a text is not a string.
        ValueError: If the LLM has no such layer.
        FloatingPointError: If a state is not finite.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> compression_states(tiny_model(), ["bees", "rivers"], layer=1).shape
        torch.Size([2, 4, 64])
    """
    transformer, llm = model.suffix_transformer, model.llm
    previews = [model.preview(text, prompt_name=prompt_name, prompt=prompt) for text in as_rows(texts)]
    resolved_layer(llm, layer)
    embed = llm.get_input_embeddings()
    device = embedding_weight(llm).device

    def embedded(row: int) -> torch.Tensor:
        found: torch.Tensor = embed(torch.tensor(previews[row].token_ids, dtype=torch.long, device=device))
        return found

    with warn_once_if_cut(transformer.text_limit), lora_enabled(llm, transformer.lora is not None):
        count_cut(sum(preview.cut for preview in previews))
        return states_behind(model, [len(preview.token_ids) for preview in previews], embedded, layer=layer)


def states_behind(
    model: LLM2VecGen, lengths: Sequence[int], prefix: Callable[[int], torch.Tensor], *, layer: int = -1
) -> torch.Tensor:
    """Hidden states of the compression tokens behind any input embeddings, in groups of similar length.

    Args:
        model: The student; its own LoRA weights are on already, if it has any.
        lengths: Positions T of each of N prefixes.
        prefix: Input embeddings (T, H) of a prefix, given its number; called when its group is run.
        layer: As in :func:`resolved_layer`.

    Returns:
        (N, n, H) float32 on the CPU.

    Raises:
        FloatingPointError: If a state is not finite; names the prefix by its number.
    """
    transformer, llm = model.suffix_transformer, model.llm
    weight = embedding_weight(llm)
    dtype = weight.dtype if weight.dtype.is_floating_point else llm.dtype
    suffix = transformer.suffix.to(weight.device, dtype)
    result = torch.zeros(len(lengths), transformer.compression_tokens, weight.shape[1])
    widths = [length + transformer.suffix_length for length in lengths]
    for group in similar_lengths(widths, transformer.max_batch_tokens):
        rows = [torch.cat([prefix(row).to(dtype), suffix]) for row in group]
        states = hidden_states(llm, pad_sequence(rows, batch_first=True), layer)
        for row, its_states in zip(group, states, strict=True):
            result[row] = its_states[widths[row] - transformer.compression_tokens : widths[row]].cpu().float()
    check_states(result)
    return result


def check_states(states: torch.Tensor) -> None:
    """Refuse hidden states (N, ..., H) that hold infinities or NaNs.

    Raises:
        FloatingPointError: If a value is not finite; names the text's position.
    """
    bad = (~torch.isfinite(states.flatten(1)).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"The hidden states of {len(bad)} texts are not finite; the first is text {bad[0]}. "
            "Check the checkpoint's weights and the dtype (float16 overflows where bfloat16 does not)."
        )
