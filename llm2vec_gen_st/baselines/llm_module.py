"""What all baselines share: a pipeline module on a causal LLM, rows of token ids, and the positions that are pooled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from typing_extensions import Self

from llm2vec_gen_st.backbone import Backbone, decoder_layers, load_backbone, placed_by_loading
from llm2vec_gen_st.modules.frozen_llm import FrozenLLM
from llm2vec_gen_st.modules.groups import in_groups, similar_lengths, tokens_at_once
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.modules.truncation import count_cut

CONFIG_FILE = "baseline_config.json"


@dataclass(frozen=True)
class Layout:
    """One text as the LLM reads it.

    Args:
        ids: Token ids, at least one.
        first: First pooled position.
        stop: Position behind the last pooled one.
        cut: Whether text was dropped to stay within the limit.
    """

    ids: list[int]
    first: int
    stop: int
    cut: bool = False


class LLMModule(FrozenLLM):
    """Texts in, ``sentence_embedding`` (B, H) out: the mean of an LLM's last hidden states over pooled positions.

    A subclass says how a text is laid out (:meth:`layout`), and may say how hidden states are computed
    (:meth:`hidden_states`). Rows are padded on the right and run in groups of similar length.

    Args:
        backbone: The LLM, frozen, shared with everything else that uses it.
        max_seq_length: Longest input in tokens, instruction and template included.
        lora: LoRA settings (``r``, ``lora_alpha``, ``target_modules``, ``lora_dropout``) of this module's own pass, or
            ``None``.
        max_batch_tokens: A group has at most this many padded tokens.

    Raises:
        ValueError: If ``max_seq_length`` is not positive, or the backbone carries LoRA layers of another model.
    """

    config_file_name = CONFIG_FILE
    saved_as: ClassVar = "baseline"

    def __init__(
        self,
        backbone: Backbone,
        *,
        max_seq_length: int = 512,
        lora: dict[str, Any] | None = None,
        max_batch_tokens: int = 8192,
    ) -> None:
        if max_seq_length < 1:
            raise ValueError(f"max_seq_length must be at least 1, got {max_seq_length}.")
        super().__init__(backbone, max_seq_length=max_seq_length, lora=lora, max_batch_tokens=max_batch_tokens)
        self._recomputed: Sequence[nn.Module] = []

    def get_embedding_dimension(self) -> int:
        """Width H of the embeddings."""
        return self.backbone.hidden_size

    @abstractmethod
    def layout(self, text: str, prompt: str) -> Layout:
        """What the LLM reads for a text, and which positions are pooled.

        Args:
            text: The text.
            prompt: The instruction; empty for none.
        """

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Token ids and pooled positions of the texts, padded on the right.

        Args:
            inputs: B texts.
            prompt: Instruction for all of them.
            **kwargs: Not used.

        Returns:
            ``input_ids``, ``attention_mask`` and ``pool_mask``, all (B, T).
        """
        return self.as_features([self.layout(text, prompt or "") for text in inputs])

    def as_features(self, rows: Sequence[Layout]) -> dict[str, Any]:
        """Laid out texts as tensors, see :meth:`preprocess`."""
        count_cut(sum(row.cut for row in rows))
        features: dict[str, Any] = pad_right([row.ids for row in rows])
        place = torch.arange(features["input_ids"].shape[1])
        bounds = torch.tensor([[row.first, row.stop] for row in rows], dtype=torch.long).reshape(len(rows), 2)
        features["pool_mask"] = ((place >= bounds[:, :1]) & (place < bounds[:, 1:])).long()
        return features

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``sentence_embedding`` (B, H) in float32 to the features.

        Args:
            features: As from :meth:`preprocess`.
            **kwargs: Not used.

        Returns:
            The features.
        """
        ids, pool = features["input_ids"], features["pool_mask"]
        lengths = features["attention_mask"].sum(dim=1)

        def pooled(rows: torch.Tensor, width: int) -> torch.Tensor:
            hidden = self.hidden_states(ids[rows, :width], lengths[rows]).float()
            weights = pool[rows, :width, None].to(hidden)
            return (hidden * weights).sum(dim=1) / weights.sum(dim=1)

        with self.own_pass():
            learning = torch.is_grad_enabled()
            budget = self.max_batch_tokens if learning else tokens_at_once(ids.device, self.max_batch_tokens)
            groups = similar_lengths(lengths.tolist(), budget)
            features["sentence_embedding"] = in_groups(pooled, groups, lengths)
        return features

    def hidden_states(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Last hidden states (b, T, H) of right-padded rows; causal attention alone keeps padding out.

        Args:
            ids: Token ids (b, T).
            lengths: Tokens of each row (b).
        """
        states: torch.Tensor = self.llm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def pass_state(self) -> AbstractContextManager[Any]:
        """A block in which the LLM is as it is while :meth:`hidden_states` run it for this module."""
        return self.own_pass()

    def train(self, mode: bool = True) -> Self:
        """Set training mode of this module; the LLM stays in evaluation mode, see :meth:`recomputing`."""
        super().train(mode)
        # A layer is run again only if its own flag says training; what is inside it stays as it is (no dropout).
        for layer in self._recomputed:
            layer.training = mode
        return self

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A block in which training keeps no activations inside the LLM's layers: backward runs each layer again.

        Values and gradients are the same, for less memory and more time.

        Raises:
            ValueError: If the LLM's class cannot do that.
        """
        # By the time of backward the forward pass has switched LoRA (and dropout) off again.
        options = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), self.pass_state())}
        # Renamed in newer versions of transformers, which warn of the older names.
        llm: Any = self.llm
        enable = getattr(llm, "activation_checkpointing_enable", None) or llm.gradient_checkpointing_enable
        disable = getattr(llm, "activation_checkpointing_disable", None) or llm.gradient_checkpointing_disable
        enable(options)
        self._recomputed = decoder_layers(llm)
        try:
            yield
        finally:
            self._recomputed = []
            disable()
            self.llm.eval()

    def text_ids(self, text: str, limit: int, *, special: bool = False) -> tuple[list[int], bool]:
        """Token ids of a piece of text, and whether it was cut to the limit."""
        found = self.text_tokenizer.ids(text, max(0, limit), add_special_tokens=special)
        return found.ids, found.cut

    def some_ids(self, ids: list[int]) -> list[int]:
        """The ids, or the tokenizer's end (or padding) token if there are none: an LLM needs something to read."""
        known = (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, 0)
        return ids or [next(int(token) for token in known if token is not None)]

    def instructed(self, text: str, prompt: str, limit: int) -> Layout:
        """Instruction and text in one piece, pooled over the text alone.

        Tokens that the tokenizer itself puts in front (BOS) belong to the instruction; a token that holds the end of
        the instruction and the start of the text belongs to the text. Without any text the last token is pooled.
        """
        ids, cut = self.text_ids(prompt + text, limit, special=True)
        before, _ = self.text_ids(prompt, limit, special=True)
        ids = self.some_ids(ids)
        return Layout(ids, min(_common_prefix(before, ids), len(ids) - 1), len(ids), cut)


def as_backbone(base: str | Path | Backbone, model_kwargs: dict[str, Any] | None = None) -> Backbone:
    """A loaded backbone, or the one that a hub id or directory names."""
    return base if isinstance(base, Backbone) else load_backbone(str(base), model_kwargs=model_kwargs)


def encoder_of(
    kind: type[LLMModule],
    base: str | Path | Backbone,
    *,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> SentenceTransformer:
    """A baseline of one module on a base LLM.

    Args:
        kind: The module's class.
        base: Hub id, directory, or loaded backbone.
        prompts: Instructions by name.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.
        **settings: The module's.

    Returns:
        The encoder.
    """
    module = kind(as_backbone(base, model_kwargs), **settings)
    return as_sentence_transformer(module, prompts=prompts, device=device, model_kwargs=model_kwargs)


def as_sentence_transformer(
    module: nn.Module,
    *,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> SentenceTransformer:
    """A pipeline of one module.

    Args:
        module: The module.
        prompts: Instructions by name, as in SentenceTransformer.
        device: Device to run on; an LLM that loading has placed stays where it is.
        model_kwargs: What the LLM was loaded with.
    """
    if device is None and isinstance(module, LLMModule):
        placed = placed_by_loading(module.llm, model_kwargs)
        device = None if placed is None else str(placed)
    model = SentenceTransformer(modules=[module], prompts=dict(prompts or {}), device=device)
    # Else the host asks the hub what a local base model is called when it writes a model card.
    model.model_card_data.local_files_only = True
    return model


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
