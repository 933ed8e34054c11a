"""Latent chaining: the soft prompt read by the same frozen LLM again, before a fresh suffix, as often as asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from llm2vec_gen_st.backbone import embedding_weight
from llm2vec_gen_st.encoding import as_rows, instruction_options
from llm2vec_gen_st.interpret.states import check_states, compression_states, states_behind
from llm2vec_gen_st.modules.lora import lora_enabled
from llm2vec_gen_st.modules.truncation import count_cut, warn_once_if_cut

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen


@dataclass(frozen=True)
class ChainStep:
    """One step of one text's chain.

    Args:
        input: Which of the texts, from 0.
        text: That text.
        step: How often its soft prompt was read again; at 0 there is the text's own.
        decoded: What the step's soft prompt decodes to.
        embedding: The step's embedding (D), as ``encode`` would give it.
        similarity_to_first: Its cosine similarity to that of step 0.
        similarity_to_previous: Its cosine similarity to that of the step before; 1 at step 0.
    """

    input: int
    text: str
    step: int
    decoded: str
    embedding: np.ndarray = field(repr=False, compare=False)
    similarity_to_first: float
    similarity_to_previous: float


@torch.inference_mode()
def latent_chain(
    model: LLM2VecGen,
    texts: str | Iterable[str],
    *,
    steps: int = 3,
    behind_text: bool = False,
    max_new_tokens: int = 64,
    prompt_name: str | None = "query",
    prompt: str | None = None,
    batch_size: int = 32,
) -> list[ChainStep]:
    """Let the frozen LLM read what it was about to say, and compress again (the paper's outlook on latent reasoning).

    Step 0 is the text's own soft prompt. Every later step runs ``soft prompt of the step before ⊕ suffix`` through the
    LLM: new compression states, and so a new soft prompt and embedding. No token is written on the way. Students are
    not trained for this.

    Args:
        model: The student.
        texts: A string or any iterable of N strings.
        steps: How often a soft prompt is read again.
        behind_text: Whether the LLM reads the text too, each time: ``text ⊕ soft prompt ⊕ suffix``.
        max_new_tokens: Longest decoded text, in tokens.
        prompt_name: Name of the instruction.
        prompt: The instruction itself, instead.
        batch_size: Soft prompts decoded at once.

    Returns:
        N * (steps + 1) records, by text and step; ``pandas.DataFrame(...)`` takes them as they are.

    Raises:
        TypeError: If a text is not a string.
        ValueError: If ``steps`` is negative, or no room is left for text beside soft prompt and suffix.
        FloatingPointError: If a state or a soft prompt is not finite; names the text's position.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> found = latent_chain(tiny_model(), "who makes honey?", steps=2, max_new_tokens=4)
        >>> [(step.step, step.embedding.shape) for step in found]
        [(0, (48,)), (1, (48,)), (2, (48,))]
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}.")
    rows = as_rows(texts)
    instruction = instruction_options(prompt_name, prompt)
    with warn_once_if_cut(model.suffix_transformer.text_limit):
        texts_before = _texts_before(model, rows, instruction) if behind_text else [[] for _ in rows]
        states = compression_states(model, rows, **instruction)
    embeddings: list[torch.Tensor] = []
    decoded: list[list[str]] = []
    for step in range(steps + 1):
        soft_prompts = _soft_prompts(model, states)
        embeddings.append(_embeddings(model, states))
        decoded.append(model.decode(soft_prompts, max_new_tokens=max_new_tokens, batch_size=batch_size) if rows else [])
        if step < steps:
            states = _read_again(model, texts_before, soft_prompts)
    to_first = [_cosines(vectors, embeddings[0]) for vectors in embeddings]
    earlier = [embeddings[0], *embeddings[:-1]]
    to_previous = [_cosines(vectors, before) for vectors, before in zip(embeddings, earlier, strict=True)]
    return [
        ChainStep(
            input=number,
            text=text,
            step=step,
            decoded=decoded[step][number],
            embedding=embeddings[step][number].numpy(),
            similarity_to_first=to_first[step][number],
            similarity_to_previous=to_previous[step][number],
        )
        for number, text in enumerate(rows)
        for step in range(steps + 1)
    ]


def _texts_before(model: LLM2VecGen, texts: list[str], instruction: dict[str, Any]) -> list[list[int]]:
    """Token ids of each text, cut to what fits beside soft prompt and suffix."""
    transformer = model.suffix_transformer
    room = transformer.text_limit - transformer.compression_tokens
    if room < 1:
        raise ValueError(
            f"max_seq_length {transformer.max_seq_length} leaves no room for text beside a soft prompt of "
            f"{transformer.compression_tokens} vectors and a suffix of {transformer.suffix_length}; raise "
            "model.max_seq_length, or chain without the text."
        )
    previews = [model.preview(text, **instruction) for text in texts]
    # Texts beyond the usual limit are counted when they are embedded.
    count_cut(sum(not preview.cut and len(preview.token_ids) > room for preview in previews))
    return [preview.token_ids[:room] for preview in previews]


def _read_again(model: LLM2VecGen, before: list[list[int]], soft_prompts: torch.Tensor) -> torch.Tensor:
    """Compression states (N, n, H) behind texts, perhaps none, and soft prompts (N, n, H)."""
    weight = embedding_weight(model.llm)
    embed = model.llm.get_input_embeddings()

    def prefix(row: int) -> torch.Tensor:
        ids = torch.tensor(before[row], dtype=torch.long, device=weight.device)
        text = embed(ids)
        return torch.cat([text, soft_prompts[row].to(text)])

    lengths = [len(ids) + soft_prompts.shape[1] for ids in before]
    with lora_enabled(model.llm, model.suffix_transformer.lora is not None):
        return states_behind(model, lengths, prefix)


def _soft_prompts(model: LLM2VecGen, states: torch.Tensor) -> torch.Tensor:
    head = model.response_head
    device = next((parameter.device for parameter in head.parameters()), states.device)
    soft_prompts = head.soft_prompt(states.to(device)).cpu()
    check_states(soft_prompts)
    return soft_prompts


def _embeddings(model: LLM2VecGen, states: torch.Tensor) -> torch.Tensor:
    """Embeddings (N, D) by everything that stands behind the LLM in the model, on the CPU."""
    features: dict[str, Any] = {"compression_states": states}
    for number in range(1, len(model)):
        features = model[number](features)
    found: torch.Tensor = features["sentence_embedding"][:, : model.truncate_dim]
    return found.float().cpu()


def _cosines(vectors: torch.Tensor, others: torch.Tensor) -> list[float]:
    # Rounding takes it beyond 1.
    found: list[float] = cosine_similarity(vectors, others).clamp(-1.0, 1.0).tolist()
    return found
