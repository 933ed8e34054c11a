"""Worker of the authors' package, run in the environment that :mod:`peers` makes for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llm2vec_gen import LLM2VecGenModel
from llm2vec_gen.losses import compute_mse_loss
from serving import measured, serve

_state: dict[str, Any] = {}


def load(checkpoint: str) -> dict[str, Any]:
    """Load the student, with trainable suffix rows, as the authors' training has it."""
    model = LLM2VecGenModel.from_pretrained(checkpoint, is_trainable=True)
    for parameter in model.model.decoder_model.parameters():
        parameter.requires_grad = False
    model.model.eval()
    _state["model"] = model
    return {"attention": model.model.decoder_model.config._attn_implementation}


def encode(texts: list[str], batch_size: int, vectors: str) -> dict[str, Any]:
    """Embed texts; their ``encode`` makes no batches, so this is one call of it per ``batch_size`` texts."""
    model = _state["model"]
    found, result = measured(
        lambda: torch.cat([model.encode(texts[at : at + batch_size]) for at in range(0, len(texts), batch_size)])
    )
    np.save(vectors, result.numpy())
    return found


def prepare_step(
    query: list[list[int]], response: list[list[int]], teacher: list[list[float]], checkpointing: bool, rate: float
) -> dict[str, Any]:
    """Take a batch, given as token ids of equal lengths, and make an optimizer."""
    model = _state["model"].model
    tokenizer = _state["model"].tokenizer
    suffix = tokenizer.convert_tokens_to_ids(tokenizer.additional_special_tokens)
    ids = torch.tensor([row + suffix for row in query])
    answer = torch.tensor(response)
    _state["batch"] = {
        "query_input_ids": ids,
        "query_attention_mask": torch.ones_like(ids),
        "answer_input_ids": answer,
        "answer_attention_mask": torch.ones_like(answer),
        "labels": answer.clone(),
    }
    _state["teacher"] = torch.tensor(teacher)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _state["optimizer"] = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    return {"trainable": sum(parameter.numel() for parameter in trained)}


def step() -> dict[str, Any]:
    """One training step with both losses, as in the authors' training script."""
    model, optimizer = _state["model"].model, _state["optimizer"]

    def run() -> tuple[float, float]:
        optimizer.zero_grad()
        states, outputs = model(**_state["batch"])
        alignment, _ = compute_mse_loss(states.mean(dim=1), _state["teacher"], mse_loss_weight=1.0)
        (outputs.loss + alignment).backward()
        optimizer.step()
        return float(outputs.loss.detach()), float(alignment.detach())

    found, losses = measured(run)
    return {**found, "reconstruction": losses[0], "alignment": losses[1]}


def prompts(texts: list[str]) -> dict[str, Any]:
    """Compute the soft prompts that :func:`decode` starts from."""
    with torch.no_grad():
        _state["prompts"] = [_state["model"].encode(text, get_recon_hidden_states=True)[1] for text in texts]
    return {}


def decode(tokens: int, first: int) -> dict[str, Any]:
    """Decode the first soft prompts, one at a time: their loop stops at an end token only then.

    The text-level ``generate`` needs CUDA; this calls the loop under it and decodes the ids in the same way.
    """
    model = _state["model"]
    empty = torch.zeros(1, 0, dtype=torch.long)

    def run() -> list[list[int]]:
        return [
            model.model.generate(empty, empty, max_new_tokens=tokens, decoder_inputs_embeds=prompt)[0].tolist()
            for prompt in _state["prompts"][:first]
        ]

    found, rows = measured(run)
    texts = model.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return {**found, "tokens": sum(len(row) for row in rows), "texts": texts}


if __name__ == "__main__":
    serve(
        {
            "load": load,
            "encode": encode,
            "prepare_step": prepare_step,
            "step": step,
            "prompts": prompts,
            "decode": decode,
        }
    )
