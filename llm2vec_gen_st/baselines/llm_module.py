"""What all baselines share: a causal LLM under a pipeline module, rows of token ids, pooled positions, saving."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from llm2vec_gen_st.backbone import Backbone, load_backbone, placed_by_loading
from llm2vec_gen_st.base_reference import BaseReference, check_base
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.config import check_fields, find_file, read_json_object
from llm2vec_gen_st.modules.lora import add_lora, load_lora, lora_enabled, lora_parameters
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.modules.tensors import CheckpointError, load_tensors, save_tensors
from llm2vec_gen_st.modules.truncation import count_cut
from llm2vec_gen_st.text import TextTokenizer

CONFIG_FILE = "baseline_config.json"
LORA_FILE = "lora.safetensors"
FORMAT_VERSION = 1

_BASE_OPTIONAL = dict.fromkeys(("revision", "fingerprint", "embedding_sample"), "text or null")
_LORA_REQUIRED = {"r": "a whole number", "lora_alpha": "a number", "target_modules": "a list of texts"}


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


class LLMModule(InputModule):
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
    tokenizer: PreTrainedTokenizerBase
    setting_kinds: ClassVar[Mapping[str, str]] = {}
    """Further constructor arguments that are saved: name to kind, as in :func:`check_fields`."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        max_seq_length: int = 512,
        lora: dict[str, Any] | None = None,
        max_batch_tokens: int = 8192,
    ) -> None:
        super().__init__()
        if max_seq_length < 1:
            raise ValueError(f"max_seq_length must be at least 1, got {max_seq_length}.")
        self.max_seq_length = max_seq_length
        self.max_batch_tokens = max_batch_tokens
        self.base = backbone.reference
        self.tokenizer = backbone.tokenizer
        self.text_tokenizer = TextTokenizer(backbone.tokenizer)
        self.llm: PreTrainedModel = backbone.llm
        self.lora = lora
        if lora is not None:
            add_lora(self.llm, lora)

    @property
    def backbone(self) -> Backbone:
        """The LLM, its tokenizer and its reference."""
        return Backbone(self.llm, self.tokenizer, self.base)

    def get_embedding_dimension(self) -> int:
        """Width H of the embeddings."""
        return self.backbone.hidden_size

    def train(self, mode: bool = True) -> Self:
        """Set training mode of this module; the LLM under it always stays in evaluation mode."""
        super().train(mode)
        self.llm.eval()
        return self

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
        found: list[torch.Tensor] = []
        order: list[int] = []
        with self.own_weights():
            for group in similar_lengths(lengths.tolist(), self.max_batch_tokens):
                order.extend(group)
                rows = torch.tensor(group, device=ids.device)
                width = int(lengths[rows].max())
                hidden = self.hidden_states(ids[rows, :width], lengths[rows]).float()
                weights = pool[rows, :width, None].to(hidden)
                found.append((hidden * weights).sum(dim=1) / weights.sum(dim=1))
        together = torch.cat(found)
        features["sentence_embedding"] = together[torch.tensor(order).argsort().to(together.device)]
        return features

    def hidden_states(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Last hidden states (b, T, H) of right-padded rows; causal attention alone keeps padding out.

        Args:
            ids: Token ids (b, T).
            lengths: Tokens of each row (b).
        """
        states: torch.Tensor = self.llm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def own_weights(self) -> Any:
        """A block in which the LLM carries this module's LoRA weights, if it has any."""
        return lora_enabled(self.llm, True, self.lora is not None)

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

    def get_config_dict(self) -> dict[str, Any]:
        """What is saved as ``baseline_config.json``."""
        return {
            "format_version": FORMAT_VERSION,
            "base": asdict(self.base),
            "max_seq_length": self.max_seq_length,
            "lora": self.lora,
            **{name: getattr(self, name) for name in self.setting_kinds},
        }

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write config and LoRA matrices; never the base model."""
        folder = Path(output_path)
        write_json(folder / CONFIG_FILE, self.get_config_dict())
        if self.lora is not None:
            save_tensors(folder / LORA_FILE, lora_parameters(self.llm))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Self:
        """Read a saved module and the base model it refers to.

        Args:
            model_name_or_path: Directory or hub id of the checkpoint.
            subfolder: Folder inside it.
            **kwargs: Options as in :class:`~llm2vec_gen_st.load_options.LoadOptions`; others of the host are not used.

        Raises:
            CheckpointError: If config or tensors are not what they should be.
            BaseModelError: If the base model is missing or another one.
        """
        options = LoadOptions.among(kwargs)
        path = find_file(cls, model_name_or_path, CONFIG_FILE, subfolder, options)
        expected, settings = cls.read_config(path)
        backbone = options.load_base(expected.id, expected.revision)
        check_base(expected, backbone.reference, strict=options.verify_base)
        try:
            module = cls(backbone, **settings)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: no baseline can be made of this: {error}") from error
        if module.lora is not None:
            module.load_weights(find_file(cls, model_name_or_path, LORA_FILE, subfolder, options))
        return module

    @classmethod
    def read_config(cls, path: Path) -> tuple[BaseReference, dict[str, Any]]:
        """The base model that a config refers to, and the module's settings, checked key by key."""
        config = read_json_object(path)
        if config.pop("format_version", None) != FORMAT_VERSION:
            raise CheckpointError(f"{path}: only format_version {FORMAT_VERSION} can be read; update llm2vec-gen-st.")
        common = {"base": "an object", "max_seq_length": "a whole number", "lora": "an object or null"}
        check_fields(str(path), config, {**common, **cls.setting_kinds})
        base = config.pop("base")
        check_fields(f"{path}, base", base, {"id": "text"}, _BASE_OPTIONAL)
        if config["lora"] is not None:
            check_fields(f"{path}, lora", config["lora"], _LORA_REQUIRED, {"lora_dropout": "a number"})
        return BaseReference(**base), config

    def load_weights(self, path: str | Path) -> None:
        """Replace the LoRA matrices by saved ones of the same form; the base model is not touched."""
        shapes = {name: tuple(matrix.shape) for name, matrix in lora_parameters(self.llm).items()}
        load_lora(self.llm, load_tensors(path, shapes))


def as_backbone(base: str | Backbone, model_kwargs: dict[str, Any] | None = None) -> Backbone:
    """A loaded backbone, or the one that a hub id or directory names."""
    return base if isinstance(base, Backbone) else load_backbone(base, model_kwargs=model_kwargs)


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


def similar_lengths(lengths: Sequence[int], budget: int, *, equal: bool = False) -> Iterator[list[int]]:
    """Row numbers in groups whose padded size stays within a budget.

    Args:
        lengths: Tokens of each row.
        budget: Padded tokens a group may have; a longer row is a group of its own.
        equal: Whether the rows of a group must have the same length; else none is padded to more than twice its size.

    Example:
        >>> list(similar_lengths([9, 2, 3], 100))
        [[1, 2], [0]]
    """
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        width = lengths[row]
        uneven = bool(group) and width > lengths[group[0]] * (1 if equal else 2)
        if uneven or (group and (len(group) + 1) * width > budget):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
