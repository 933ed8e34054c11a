"""What modules on a frozen causal LLM share: holding it, LoRA weights of their own, saving, and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers.base.modules import InputModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.base_reference import BaseReference, check_base
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.config import check_fields, find_file, read_json_object
from llm2vec_gen_st.modules.lora import add_lora, load_lora, lora_enabled, lora_parameters
from llm2vec_gen_st.modules.tensors import CheckpointError, load_tensors, save_tensors
from llm2vec_gen_st.products import prepare_products, quick_products
from llm2vec_gen_st.text import TextTokenizer

LORA_FILE = "lora.safetensors"
FORMAT_VERSION = 1

_BASE_OPTIONAL = dict.fromkeys(("revision", "fingerprint", "embedding_sample"), "text or null")
_LORA = {"r": "a whole number", "lora_alpha": "a number", "target_modules": "a list of texts"}


class FrozenLLM(InputModule):
    """A module that runs a frozen causal LLM, which others may use too.

    What is saved is the module's settings, its LoRA matrices and a reference to the LLM; never the LLM itself.

    Args:
        backbone: The LLM.
        max_seq_length: Longest input in tokens.
        lora: LoRA settings (``r``, ``lora_alpha``, ``target_modules``, ``lora_dropout``) of this module's own pass, or
            ``None``.
        max_batch_tokens: A batch is run in groups of similar length with at most this many padded tokens each.

    Raises:
        ValueError: If the backbone carries LoRA layers of another model.
    """

    tokenizer: PreTrainedTokenizerBase
    saved_as: ClassVar[str]
    """What such a module is called in messages."""
    setting_kinds: ClassVar[Mapping[str, str]] = {"max_seq_length": "a whole number", "lora": "an object or null"}
    """Constructor arguments that are saved: name to kind, as in :func:`check_fields`."""

    def __init__(
        self, backbone: Backbone, *, max_seq_length: int, lora: dict[str, Any] | None, max_batch_tokens: int
    ) -> None:
        super().__init__()
        self.max_seq_length = max_seq_length
        self.max_batch_tokens = max_batch_tokens
        self.base = backbone.reference
        self.tokenizer = backbone.tokenizer
        self.text_tokenizer = TextTokenizer(backbone.tokenizer)
        self.llm: PreTrainedModel = backbone.llm
        prepare_products(self.llm)
        self.lora = lora
        if lora is not None:
            add_lora(self.llm, lora)

    @property
    def backbone(self) -> Backbone:
        """The LLM, its tokenizer and its reference."""
        return Backbone(self.llm, self.tokenizer, self.base)

    def train(self, mode: bool = True) -> Self:
        """Set training mode of this module; the LLM under it always stays in evaluation mode."""
        super().train(mode)
        self.llm.eval()
        return self

    @contextmanager
    def own_pass(self) -> Iterator[None]:
        """A block for this module's pass: the LLM carries the module's LoRA weights or none, and multiplies quickly."""
        with lora_enabled(self.llm, self.lora is not None), quick_products():
            yield

    def attends_to_everything(self, width: int) -> bool:
        """Whether every layer sees all positions before it, so that padding inside a cache shifts nothing.

        Args:
            width: Longest row in tokens.
        """
        config = self.llm.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        windows = (getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None))
        return kinds <= {"full_attention", "sliding_attention"} and all(not size or width <= size for size in windows)

    def get_config_dict(self) -> dict[str, Any]:
        """What is saved as the module's config file."""
        return {
            "format_version": FORMAT_VERSION,
            "base": asdict(self.base),
            **{name: getattr(self, name) for name in self.setting_kinds},
        }

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write config and LoRA matrices; never the base model."""
        folder = Path(output_path)
        write_json(folder / self.config_file_name, self.get_config_dict())
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

        def find(name: str) -> Path:
            return find_file(cls, model_name_or_path, name, subfolder, options)

        path = find(cls.config_file_name)
        expected, settings = read_config(path, cls.setting_kinds)
        backbone = load_referenced(expected, path.parent, options)
        tensors = cls.read_tensors(find, settings, backbone.hidden_size)
        try:
            module = cls(backbone, **settings)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: no {cls.saved_as} can be made of this: {error}") from error
        for name, tensor in tensors.items():
            getattr(module, name).data.copy_(tensor)
        if module.lora is not None:
            module.load_lora_file(find(LORA_FILE))
        return module

    @classmethod
    def read_tensors(
        cls, find: Callable[[str], Path], settings: Mapping[str, Any], hidden_size: int
    ) -> dict[str, torch.Tensor]:
        """Tensors that a module of this class saves beside the LoRA matrices; called before the module is made.

        Args:
            find: Place of a file of the checkpoint.
            settings: The module's settings, each of the kind it should be.
            hidden_size: Width H of the LLM.

        Returns:
            Name of the module's parameter to tensor.

        Raises:
            CheckpointError: If files or settings are not what they should be.
        """
        return {}

    def load_lora_file(self, path: str | Path) -> None:
        """Replace the LoRA matrices by saved ones of the same form; the base model is not touched.

        Raises:
            CheckpointError: If the file holds anything else.
        """
        shapes = {name: tuple(matrix.shape) for name, matrix in lora_parameters(self.llm).items()}
        load_lora(self.llm, load_tensors(path, shapes))


def read_config(path: Path, kinds: Mapping[str, str]) -> tuple[BaseReference, dict[str, Any]]:
    """The base model that a module's config file refers to, and the module's settings, checked key by key.

    Args:
        path: The file.
        kinds: Name to kind of the settings, as in :func:`~llm2vec_gen_st.modules.config.check_fields`.

    Returns:
        The reference and the settings.

    Raises:
        CheckpointError: If the file is of another version, or a key is missing, not known, or of another kind.
    """
    config = read_json_object(path)
    if config.pop("format_version", None) != FORMAT_VERSION:
        raise CheckpointError(f"{path}: only format_version {FORMAT_VERSION} can be read; update llm2vec-gen-st.")
    check_fields(str(path), config, {"base": "an object", **kinds})
    base = config.pop("base")
    check_fields(f"{path}, base", base, {"id": "text"}, _BASE_OPTIONAL)
    if config.get("lora") is not None:
        check_fields(f"{path}, lora", config["lora"], _LORA, {"lora_dropout": "a number"})
    return BaseReference(**base), config


def load_referenced(expected: BaseReference, folder: Path, options: LoadOptions) -> Backbone:
    """The base model that a checkpoint refers to.

    Args:
        expected: What the checkpoint recorded; an id that is no directory here may be one inside the checkpoint.
        folder: The checkpoint's directory.
        options: How to load it, or the one to use instead.

    Returns:
        The backbone, its weights compared with those recorded.

    Raises:
        BaseModelError: If it is missing or another one.
    """
    beside = folder / expected.id
    base_id = str(beside) if not Path(expected.id).is_dir() and beside.is_dir() else expected.id
    backbone = options.load_base(base_id, expected.revision)
    check_base(expected, backbone.reference, strict=options.verify_base)
    return backbone
