"""Texts in, hidden states of the compression tokens out: a frozen LLM and a trained suffix of embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.modules.attention import quick_backward
from llm2vec_gen_st.modules.frozen_llm import FrozenLLM
from llm2vec_gen_st.modules.groups import in_groups, similar_lengths, tokens_at_once
from llm2vec_gen_st.modules.last_layer import only_at, prepare_last_layer
from llm2vec_gen_st.modules.tensors import CheckpointError, load_tensors, save_tensors
from llm2vec_gen_st.modules.truncation import count_cut

CONFIG_FILE = "suffix_config.json"
SUFFIX_FILE = "suffix.safetensors"

_WORTH_SHARING = 64


class SuffixTransformer(FrozenLLM):
    """Run ``text ⊕ t_1..t_m ⊕ c_1..c_n`` through a frozen causal LLM once (paper, section 3).

    The suffix is a parameter appended to the input *embeddings*: tokenizer and vocabulary stay as they are, no text
    can spell a suffix token, and truncation cuts text only. Each row is laid out as text, suffix, padding, so causal
    attention alone keeps padding out, without any mask.

    Args:
        backbone: The frozen LLM, shared with everything else that uses it.
        thought_tokens: m.
        compression_tokens: n.
        max_seq_length: Longest input in tokens, suffix included.
        end_of_response: Text that ends a response in reconstruction; ``None`` for the tokenizer's end-of-text token.
        end_of_text_ids: Token ids that end decoding; ``None`` for the LLM's own.
        lora: LoRA settings of the student pass, or ``None``.
        max_batch_tokens: A batch is run in groups of similar length with at most this many padded tokens each.
    """

    config_file_name = CONFIG_FILE
    saved_as: ClassVar = "student"
    setting_kinds: ClassVar = {
        "thought_tokens": "a whole number",
        "compression_tokens": "a whole number",
        "max_seq_length": "a whole number",
        "end_of_response": "text or null",
        "end_of_text_ids": "a list of whole numbers or null",
        "lora": "an object or null",
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        thought_tokens: int = 10,
        compression_tokens: int = 10,
        max_seq_length: int = 512,
        end_of_response: str | None = None,
        end_of_text_ids: Sequence[int] | None = None,
        lora: dict[str, Any] | None = None,
        max_batch_tokens: int = 8192,
    ) -> None:
        if thought_tokens < 0 or compression_tokens < 1:
            raise ValueError(
                f"A suffix needs at least 1 compression token and no negative thought tokens, "
                f"got {thought_tokens} thought and {compression_tokens} compression tokens."
            )
        if max_seq_length <= thought_tokens + compression_tokens:
            raise ValueError(
                f"max_seq_length {max_seq_length} leaves no room for text beside "
                f"{thought_tokens + compression_tokens} suffix tokens."
            )
        embeddings = embedding_weight(backbone.llm)
        # Drawn before the LoRA matrices are: a seed stands for the same student as ever.
        start = torch.randn(thought_tokens + compression_tokens, embeddings.shape[1], device=_real_device(embeddings))
        super().__init__(backbone, max_seq_length=max_seq_length, lora=lora, max_batch_tokens=max_batch_tokens)
        prepare_last_layer(self.llm)
        self.thought_tokens = thought_tokens
        self.compression_tokens = compression_tokens
        self.end_of_response = end_of_response
        self.end_of_text_ids = list(end_of_text_ids) if end_of_text_ids is not None else None
        # First parameter of the model and float32: the host casts later modules to the dtype of the first parameter.
        self.suffix = nn.Parameter(start * float(embeddings.detach()[:1024].float().std()))

    @property
    def suffix_length(self) -> int:
        """M + n."""
        return self.thought_tokens + self.compression_tokens

    @property
    def text_limit(self) -> int:
        """Tokens of text that fit beside the suffix.

        Raises:
            ValueError: If there is no room for any.
        """
        if self.max_seq_length <= self.suffix_length:
            raise ValueError(
                f"max_seq_length {self.max_seq_length} leaves no room for text beside {self.suffix_length} suffix "
                "tokens; set it higher."
            )
        return self.max_seq_length - self.suffix_length

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Token ids of the texts, cut to make room for the suffix, padded on the right.

        Args:
            inputs: B texts.
            prompt: Instruction put in front of each text.
            **kwargs: Not used.

        Returns:
            ``input_ids`` and ``attention_mask``, both (B, T).
        """
        rows = self.text_tokenizer.batch([(prompt or "") + text for text in inputs], self.text_limit)
        count_cut(sum(row.cut for row in rows))
        return pad_right([row.ids for row in rows])

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``compression_states`` (B, n, H) in float32 to the features.

        Args:
            features: ``input_ids`` and ``attention_mask`` (B, T), right-padded.
            **kwargs: Not used.

        Returns:
            The features; ``token_embeddings`` are the compression states too, with a mask of ones.
        """
        ids, lengths = features["input_ids"], features["attention_mask"].sum(dim=1)
        with self.own_pass():
            states = self._states_in_groups(ids, lengths)
        features["compression_states"] = features["token_embeddings"] = states.float()
        features["attention_mask"] = features["attention_mask"].new_ones(states.shape[:2])
        return features

    def _states_in_groups(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, n, H) of the compression tokens, rows of similar length at a time."""
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._states
        budget = self.max_batch_tokens
        free = self.attends_to_everything(ids.shape[1] + self.suffix_length)
        if not torch.is_grad_enabled():
            budget = tokens_at_once(ids.device, budget)
            shared = shared_start(ids, lengths) if free else 0
            # The cache costs something too: less than this many tokens are sooner run again.
            if shared * (len(ids) - 1) >= _WORTH_SHARING:
                start = self.llm.base_model(input_ids=ids[:1, :shared], use_cache=True).past_key_values
                ids, lengths = ids[:, shared:], lengths - shared
                run = partial(self._states_after, start)
        elif free and self.suffix.requires_grad and self.lora is None:
            run = self._states_after_frozen_text
        groups = similar_lengths([length + self.suffix_length for length in lengths.tolist()], budget)
        return in_groups(lambda rows, width: run(ids[rows, :width], lengths[rows]), groups, lengths)

    def _states_after(self, start: Cache, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The states of rows that go on behind the same tokens, such as an instruction, which have been run once."""
        past = copy.deepcopy(start)
        past.batch_repeat_interleave(len(ids))
        return self._states(ids, lengths, past)

    def _states(self, ids: torch.Tensor, lengths: torch.Tensor, past: Cache | None = None) -> torch.Tensor:
        """Hidden states (b, n, H) of the compression tokens, by one causal forward, perhaps behind cached tokens."""
        embedded = self.llm.get_input_embeddings()(ids)
        suffix = self._suffix_like(embedded)
        lengths = lengths.to(embedded.device)
        room = embedded.new_zeros(len(ids), self.suffix_length, embedded.shape[-1])
        place = torch.arange(ids.shape[1] + self.suffix_length, device=embedded.device) - lengths[:, None]
        in_suffix = (place >= 0) & (place < self.suffix_length)
        rows = torch.where(
            in_suffix[..., None], suffix[place.clamp(0, self.suffix_length - 1)], torch.cat([embedded, room], dim=1)
        )
        first = lengths + self.thought_tokens
        index = first[:, None] + torch.arange(self.compression_tokens, device=lengths.device)
        with quick_backward(rows), only_at(index, rows.shape[1]):
            hidden = self.llm.base_model(
                inputs_embeds=rows, past_key_values=past, use_cache=past is not None
            ).last_hidden_state
        index = index.to(hidden.device)
        return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))

    def _states_after_frozen_text(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The same states with gradients for the suffix only: attention is causal, so text needs none."""
        if ids.shape[1] == 0:
            return self._states(ids, lengths)
        with torch.no_grad():
            past = self.llm.base_model(input_ids=ids, use_cache=True).past_key_values
        suffix = self._suffix_like(embedding_weight(self.llm)).expand(len(ids), -1, -1)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        steps = torch.arange(self.suffix_length, device=ids.device)
        with quick_backward(suffix):
            hidden = self.llm.base_model(
                inputs_embeds=suffix,
                attention_mask=torch.cat([mask, mask.new_ones(len(ids), self.suffix_length)], dim=1),
                position_ids=lengths[:, None] + steps,
                past_key_values=past,
                use_cache=True,
            ).last_hidden_state
        return hidden[:, self.thought_tokens :]

    def _suffix_like(self, reference: torch.Tensor) -> torch.Tensor:
        dtype = reference.dtype if reference.dtype.is_floating_point else self.llm.dtype
        return self.suffix.to(device=reference.device, dtype=dtype)

    def response_ids(
        self, responses: Sequence[str], limit: int, *, ended: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Token ids of responses as reconstruction targets: text, then the end of the response.

        Args:
            responses: B responses.
            limit: Longest target in tokens; a longer one loses its end.
            ended: For each response whether it came to its end; one that was broken off gets no end. All did if not
                given.

        Returns:
            B lists of ids.

        Raises:
            ValueError: If there is nothing that could end a response.
        """
        end = self.end_of_response if self.end_of_response is not None else self.tokenizer.eos_token
        if end is None:
            raise ValueError(
                "The tokenizer has no end-of-text token; set end_of_response to the text that ends a response."
            )
        end_id = self.tokenizer.get_added_vocab().get(end)
        written: list[list[int]] = []
        for response, whole in zip(responses, ended or [True] * len(responses), strict=True):
            ids = self.text_tokenizer.ids(response + end if whole and end_id is None else response, limit).ids
            written.append([*ids, end_id][:limit] if whole and end_id is not None else ids)
        return written

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write config and suffix (and LoRA matrices); never the base model.

        Raises:
            ValueError: If ``max_seq_length`` has been set so low that it could not be loaded again.
        """
        _ = self.text_limit
        super().save(output_path)
        save_tensors(Path(output_path) / SUFFIX_FILE, {"suffix": self.suffix})

    @classmethod
    def read_tensors(
        cls, find: Callable[[str], Path], settings: Mapping[str, Any], hidden_size: int
    ) -> dict[str, torch.Tensor]:
        """The saved suffix.

        Raises:
            CheckpointError: If it is missing or of another size than the settings say, or LoRA's rank makes no sense.
        """
        # Read before the module is made: a suffix of the size that the config names then does exist.
        rows = settings["thought_tokens"] + settings["compression_tokens"]
        found = load_tensors(find(SUFFIX_FILE), {"suffix": (rows, hidden_size)})
        rank = (settings["lora"] or {"r": 1})["r"]
        if not 1 <= rank <= hidden_size:
            raise CheckpointError(f"{find(CONFIG_FILE)}, lora: 'r' must be from 1 to {hidden_size}, found {rank}.")
        return found

    def load_weights(self, suffix_path: str | Path, lora_path: str | Path | None = None) -> None:
        """Replace suffix (and LoRA matrices) by saved ones of the same form; the base model is not touched."""
        self.suffix.data.copy_(load_tensors(suffix_path, {"suffix": tuple(self.suffix.shape)})["suffix"])
        if lora_path is not None:
            self.load_lora_file(lora_path)


def pad_right(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Rows of ids as one tensor.

    Args:
        rows: B lists of ids.

    Returns:
        ``input_ids`` (0 where padded) and ``attention_mask``, both (B, T).

    Example:
        >>> pad_right([[5, 6], [7]])["input_ids"].tolist()
        [[5, 6], [7, 0]]
    """
    width = max((len(row) for row in rows), default=0)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[number, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def shared_start(ids: torch.Tensor, lengths: torch.Tensor) -> int:
    """How many tokens all rows start with.

    Args:
        ids: (B, T), padded on the right.
        lengths: Tokens of each row (B).

    Example:
        >>> shared_start(torch.tensor([[5, 6, 7], [5, 6, 0]]), torch.tensor([3, 2]))
        2
    """
    shortest = int(lengths.min())
    differs = (ids[:, :shortest] != ids[:1, :shortest]).any(dim=0).nonzero()
    return int(differs[0]) if len(differs) else shortest


def _real_device(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device
