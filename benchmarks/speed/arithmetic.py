"""Floating-point operations that the mathematics asks of a Llama-like LLM; an operation counts two for each product."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self


@dataclass(frozen=True)
class Shape:
    """What the operations depend on.

    Args:
        layers: Number of layers.
        layer_weights: Weights of a layer's matrices.
        attention_width: Heads times their width.
        head_weights: Weights of the LM head.
    """

    layers: int
    layer_weights: int
    attention_width: int
    head_weights: int

    @classmethod
    def of(cls, directory: Path) -> Self:
        """The shape of a model in a directory, from its config.

        Args:
            directory: Holds ``config.json`` of a Llama-like model: gated MLP, no biases.
        """
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        return cls(
            layers=config["num_hidden_layers"],
            layer_weights=2 * hidden * width + 2 * hidden * keys + 3 * hidden * config["intermediate_size"],
            attention_width=width,
            head_weights=config["vocab_size"] * hidden,
        )

    def linear(self, tokens: int) -> float:
        """The layers' matrices on a number of tokens, in one direction; backward to inputs alone is the same again."""
        return 2.0 * self.layers * self.layer_weights * tokens

    def attention(self, new: int, before: int = 0) -> float:
        """Causal attention of new tokens to themselves and those before, forward."""
        pairs = new * before + new * (new + 1) / 2
        return 4.0 * self.layers * self.attention_width * pairs

    def forward(self, lengths: Iterable[int]) -> float:
        """A forward pass without LM head over rows of these lengths, nothing padded."""
        return sum(self.linear(length) + self.attention(length) for length in lengths)

    def training_step(self, rows: int, query: int, suffix: int, prompt: int, response: int) -> float:
        """One step with both losses, where suffix and heads learn and the LLM is frozen.

        Query tokens run forward only. Through suffix and reconstruction, gradients go to the inputs but to no weights.
        Logits exist for response tokens alone, and nothing is computed twice.

        Args:
            rows: B.
            query: Tokens of a query.
            suffix: Tokens of the suffix, m + n.
            prompt: Vectors of the soft prompt, n.
            response: Tokens of a response.
        """
        student = self.forward([query]) + 2 * self.linear(suffix) + self.attention(suffix, query)
        # Backward: gradients of scores and of their queries over all keys, of keys and values over the suffix's own.
        student += self.attention(suffix, query) + self.attention(suffix)
        read = prompt + response - 1
        reconstruction = 2 * self.linear(read) + 3 * self.attention(read)
        return rows * (student + reconstruction + 4.0 * self.head_weights * response)

    def reconstruction_again(self, rows: int, prompt: int, response: int) -> float:
        """What checkpointing of the reconstruction pass adds: its forward pass once more."""
        return rows * self.forward([prompt + response - 1])
