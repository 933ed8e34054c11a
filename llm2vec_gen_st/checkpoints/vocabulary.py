"""Adding the suffix to a copy of a tokenizer, for the checkpoint forms that keep it in the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llm2vec_gen_st.files import write_atomically, write_json


def extended_tokenizer(tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> tuple[Tokenizer, list[int]]:
    """Copy a tokenizer's core and add special tokens to the copy.

    Args:
        tokenizer: The base model's tokenizer; it is not changed.
        names: Names of N new tokens.

    Returns:
        The copy, without padding and truncation, and the N ids.

    Raises:
        ValueError: If a name is in the vocabulary already.
    """
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    known = [name for name in names if core.token_to_id(name) is not None]
    if known:
        raise ValueError(f"The tokenizer already has the tokens {known}, so this form cannot hold the suffix.")
    core.no_padding()
    core.no_truncation()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    vocabulary = core.get_vocab(with_added_tokens=True)
    return core, [vocabulary[name] for name in names]


def save_tokenizer(
    directory: Path, core: Tokenizer, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> None:
    """Write tokenizer files that transformers 4 and 5 read alike.

    Args:
        directory: Where to.
        core: The tokenizer itself.
        tokenizer: Source of the roles of tokens (BOS, EOS, ...).
        settings: Further entries of ``tokenizer_config.json``.
    """
    roles = {
        role: str(token)
        for role in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (token := getattr(tokenizer, role, None)) is not None
    }
    if "pad_token" not in roles and "eos_token" in roles:
        roles["pad_token"] = roles["eos_token"]
    added = {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in sorted(core.get_added_tokens_decoder().items())
    }
    write_text(directory / "tokenizer.json", core.to_str(pretty=True))
    write_json(
        directory / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "truncation_side": "right",
            **roles,
            **settings,
        },
    )
    names = settings.get("additional_special_tokens")
    write_json(directory / "special_tokens_map.json", roles | ({"additional_special_tokens": names} if names else {}))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def unscaled_embedding(llm: PreTrainedModel) -> torch.Tensor:
    """The input embedding (V, H), if looking a token up gives its row as it is.

    Raises:
        ValueError: If the family scales rows on look-up, so that the suffix cannot become rows.
    """
    embeddings: Any = llm.get_input_embeddings()
    weight: torch.Tensor = embeddings.weight.detach()
    if weight.device.type != "meta":
        sample = torch.arange(min(2, len(weight)), device=weight.device)
        with torch.no_grad():
            same = torch.equal(embeddings(sample), weight[sample])
        if not same:
            raise ValueError(
                f"{type(llm).__name__} scales its input embeddings, so its suffix cannot be kept as rows of them."
            )
    return weight
