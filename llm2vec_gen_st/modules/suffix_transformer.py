"""Texts in, hidden states of the compression tokens out: a frozen LLM and a trained suffix of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import InputModule
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.base_reference import BaseReference, check_base
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.config import check_fields, find_file, read_json_object
from llm2vec_gen_st.modules.lora import add_lora, load_lora, lora_enabled, lora_parameters
from llm2vec_gen_st.modules.tensors import CheckpointError, load_tensors, save_tensors
from llm2vec_gen_st.modules.truncation import count_cut
from llm2vec_gen_st.text import TextTokenizer

CONFIG_FILE = "suffix_config.json"
SUFFIX_FILE = "suffix.safetensors"
LORA_FILE = "lora.safetensors"
FORMAT_VERSION = 1

_CONFIG = {
    "base": "an object",
    "thought_tokens": "a whole number",
    "compression_tokens": "a whole number",
    "max_seq_length": "a whole number",
    "end_of_response": "text or null",
    "end_of_text_ids": "a list of whole numbers or null",
    "lora": "an object or null",
}
_OPTIONAL_BASE = ("revision", "fingerprint", "embedding_sample")
_LORA = {"r": "a whole number", "lora_alpha": "a number", "target_modules": "a list of texts"}


class SuffixTransformer(InputModule):
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
    tokenizer: PreTrainedTokenizerBase

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
        super().__init__()
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
        self.thought_tokens = thought_tokens
        self.compression_tokens = compression_tokens
        self.max_seq_length = max_seq_length
        self.max_batch_tokens = max_batch_tokens
        self.end_of_response = end_of_response
        self.end_of_text_ids = list(end_of_text_ids) if end_of_text_ids is not None else None
        self.lora = lora
        self.base = backbone.reference
        self.tokenizer = backbone.tokenizer
        self.text_tokenizer = TextTokenizer(backbone.tokenizer)
        embeddings = embedding_weight(backbone.llm)
        # First parameter of the model and float32: the host casts later modules to the dtype of the first parameter.
        self.suffix = nn.Parameter(
            torch.randn(self.suffix_length, embeddings.shape[1], device=_real_device(embeddings))
            * float(embeddings.detach()[:1024].float().std())
        )
        self.llm = backbone.llm
        if lora is not None:
            add_lora(self.llm, lora)

    @property
    def suffix_length(self) -> int:
        """M + n."""
        return self.thought_tokens + self.compression_tokens

    @property
    def backbone(self) -> Backbone:
        """The LLM, its tokenizer and its reference."""
        return Backbone(self.llm, self.tokenizer, self.base)

    @property
    def text_limit(self) -> int:
        """Tokens of text that fit beside the suffix."""
        return self.max_seq_length - self.suffix_length

    def train(self, mode: bool = True) -> Self:
        """Set training mode of the suffix; the frozen LLM always stays in evaluation mode."""
        super().train(mode)
        self.llm.eval()
        return self

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
        with lora_enabled(self.llm, True, self.lora is not None):
            states = self._states_in_groups(ids, lengths)
        features["compression_states"] = features["token_embeddings"] = states.float()
        features["attention_mask"] = features["attention_mask"].new_ones(states.shape[:2])
        return features

    def _states_in_groups(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, n, H) of the compression tokens, rows of similar length at a time."""
        needs_gradient = torch.is_grad_enabled() and self.suffix.requires_grad and self.lora is None
        frozen_text = needs_gradient and self._attends_to_everything(ids.shape[1] + self.suffix_length)
        run = self._states_after_frozen_text if frozen_text else self._states
        states: list[torch.Tensor] = []
        order: list[int] = []
        for group in _groups(lengths.tolist(), self.suffix_length, self.max_batch_tokens):
            order.extend(group)
            rows = torch.tensor(group, device=ids.device)
            states.append(run(ids[rows, : int(lengths[rows].max())], lengths[rows]))
        inverse = torch.tensor(order).argsort()
        together = torch.cat(states)
        return together[inverse.to(together.device)]

    def _states(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Hidden states (b, n, H) of the compression tokens, by one plain causal forward."""
        embedded = self.llm.get_input_embeddings()(ids)
        suffix = self._suffix_like(embedded)
        lengths = lengths.to(embedded.device)
        room = embedded.new_zeros(len(ids), self.suffix_length, embedded.shape[-1])
        place = torch.arange(ids.shape[1] + self.suffix_length, device=embedded.device) - lengths[:, None]
        in_suffix = (place >= 0) & (place < self.suffix_length)
        rows = torch.where(
            in_suffix[..., None], suffix[place.clamp(0, self.suffix_length - 1)], torch.cat([embedded, room], dim=1)
        )
        hidden = self.llm.base_model(inputs_embeds=rows, use_cache=False).last_hidden_state
        first = lengths.to(hidden.device) + self.thought_tokens
        index = first[:, None] + torch.arange(self.compression_tokens, device=hidden.device)
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
        hidden = self.llm.base_model(
            inputs_embeds=suffix,
            attention_mask=torch.cat([mask, mask.new_ones(len(ids), self.suffix_length)], dim=1),
            position_ids=lengths[:, None] + steps,
            past_key_values=past,
            use_cache=True,
        ).last_hidden_state
        return hidden[:, self.thought_tokens :]

    def _attends_to_everything(self, width: int) -> bool:
        """Whether every layer sees all positions before it, so that padding inside a cache shifts nothing."""
        config = self.llm.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        windows = (getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None))
        return kinds <= {"full_attention", "sliding_attention"} and all(not size or width <= size for size in windows)

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

    def get_config_dict(self) -> dict[str, Any]:
        """What is saved as ``suffix_config.json``."""
        return {
            "format_version": FORMAT_VERSION,
            "base": asdict(self.base),
            "thought_tokens": self.thought_tokens,
            "compression_tokens": self.compression_tokens,
            "max_seq_length": self.max_seq_length,
            "end_of_response": self.end_of_response,
            "end_of_text_ids": self.end_of_text_ids,
            "lora": self.lora,
        }

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write config and suffix (and LoRA matrices); never the base model."""
        folder = Path(output_path)
        write_json(folder / CONFIG_FILE, self.get_config_dict())
        save_tensors(folder / SUFFIX_FILE, {"suffix": self.suffix})
        if self.lora is not None:
            save_tensors(folder / LORA_FILE, lora_parameters(self.llm))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Self:
        """Read a saved suffix and the base model it refers to.

        Args:
            model_name_or_path: Directory or hub id of the checkpoint.
            subfolder: Folder inside it.
            **kwargs: Options as in :class:`~llm2vec_gen_st.load_options.LoadOptions`; others of the host are not used.

        Raises:
            CheckpointError: If config or tensors are not what they should be.
            BaseModelError: If the base model is missing or another one.
        """
        options = LoadOptions.among(kwargs)
        config_path = find_file(cls, model_name_or_path, CONFIG_FILE, subfolder, options)
        suffix_path = find_file(cls, model_name_or_path, SUFFIX_FILE, subfolder, options)
        expected, config = _read_config(config_path)
        beside = config_path.parent / expected.id
        base_id = str(beside) if not Path(expected.id).is_dir() and beside.is_dir() else expected.id
        backbone = options.load_base(base_id, expected.revision)
        check_base(expected, backbone.reference, strict=options.verify_base)
        # Read before the module is made: a suffix of the size that the config names then does exist.
        rows = config["thought_tokens"] + config["compression_tokens"]
        suffix = load_tensors(suffix_path, {"suffix": (rows, backbone.hidden_size)})["suffix"]
        rank, width = (config["lora"] or {"r": 1})["r"], backbone.hidden_size
        if not 1 <= rank <= width:
            raise CheckpointError(f"{config_path}, lora: 'r' must be from 1 to {width}, found {rank}.")
        try:
            module = cls(backbone, **config)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{config_path}: no student can be made of this: {error}") from error
        module.suffix.data.copy_(suffix)
        if module.lora is not None:
            module._load_lora_file(find_file(cls, model_name_or_path, LORA_FILE, subfolder, options))
        return module

    def load_weights(self, suffix_path: str | Path, lora_path: str | Path | None = None) -> None:
        """Replace suffix (and LoRA matrices) by saved ones of the same form; the base model is not touched."""
        self.suffix.data.copy_(load_tensors(suffix_path, {"suffix": tuple(self.suffix.shape)})["suffix"])
        if lora_path is not None:
            self._load_lora_file(lora_path)

    def _load_lora_file(self, path: str | Path) -> None:
        shapes = {name: tuple(matrix.shape) for name, matrix in lora_parameters(self.llm).items()}
        load_lora(self.llm, load_tensors(path, shapes))


def _read_config(path: Path) -> tuple[BaseReference, dict[str, Any]]:
    """The base model that ``suffix_config.json`` refers to, and the module's settings, checked key by key."""
    config = read_json_object(path)
    if config.pop("format_version", None) != FORMAT_VERSION:
        raise CheckpointError(f"{path}: only format_version {FORMAT_VERSION} can be read; update llm2vec-gen-st.")
    check_fields(str(path), config, _CONFIG)
    base, lora = config.pop("base"), config["lora"]
    check_fields(f"{path}, base", base, {"id": "text"}, dict.fromkeys(_OPTIONAL_BASE, "text or null"))
    if lora is not None:
        check_fields(f"{path}, lora", lora, _LORA, {"lora_dropout": "a number"})
    return BaseReference(**base), config


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


def _groups(lengths: Sequence[int], suffix_length: int, budget: int) -> Iterator[list[int]]:
    """Row numbers in groups: none is padded to more than twice its size, and padded sizes stay within the budget."""
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        width = lengths[row] + suffix_length
        too_uneven = bool(group) and width > 2 * (lengths[group[0]] + suffix_length)
        if too_uneven or (group and (len(group) + 1) * width > budget):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _real_device(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device
