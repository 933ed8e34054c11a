"""Reading checkpoints of the authors' package: a PEFT adapter on the base model's vocabulary, and two pickled heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.base_reference import BaseModelError
from llm2vec_gen_st.checkpoints.directory import ADAPTER_CONFIG_FILE, Form, recognise
from llm2vec_gen_st.checkpoints.hub import fetch_checkpoint
from llm2vec_gen_st.checkpoints.vocabulary import unscaled_embedding
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules import ResponseHead, SuffixTransformer
from llm2vec_gen_st.modules.config import check_fields, read_json_object
from llm2vec_gen_st.modules.lora import load_lora, lora_parameters
from llm2vec_gen_st.modules.tensors import CheckpointError, load_tensors
from llm2vec_gen_st.responses.generation import end_of_text_ids

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

ADAPTER_FILE = Path("encoder", "adapter_model.safetensors")
ENCODER_CONFIG_FILE = Path("encoder", "config.json")
PIPELINE_CONFIG_FILE = "encoder_decoder_config.json"
RUN_CONFIG_FILE = "run_config.yml"
RECONSTRUCTION_FILE = "reconstruction_mlp"
ALIGNMENT_FILE = "alignment_mlp"

KEY_PREFIX = "base_model.model."
END_OF_RESPONSE = "<|end_of_text|>"
MAX_SEQ_LENGTH_KEY = "max_seq_length"
DEFAULT_ENCODING_MODE = "last_10_tokens"

# The authors' generate() stops at these ids too, whatever the config says.
_FAMILY_END_IDS = {"llama": 128001, "qwen2": 151643, "qwen3": 151643}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LORA_OPTIONS_OFF = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "exclude_modules",
)
_LORA_NUMBERS = {"r": "a whole number", "lora_alpha": "a number", "lora_dropout": "a number"}
_ROWS_COMPARED_AT_ONCE = 8192


def import_official(path_or_id: str | Path, **options: Any) -> LLM2VecGen:
    """Load a checkpoint of the authors' package (``McGill-NLP/LLM2Vec-Gen-*``), exactly.

    Its vectors, soft prompts and decoded texts are those of the authors' code, except that special tokens spelled
    inside a text stay text here. :class:`~llm2vec_gen_st.LLM2VecGen` loads such a checkpoint too; this function takes
    no other form.

    Args:
        path_or_id: Directory or hub id.
        **options: Options of :class:`~llm2vec_gen_st.LLM2VecGen` (``model_kwargs``, ``backbone``, ``device``, ...).
            The base model's dtype is the checkpoint's if ``model_kwargs`` gives none; ``verify_base`` compares its
            input embeddings with the checkpoint's.

    Returns:
        The student; ``save_pretrained`` then writes it in our own form.

    Raises:
        CheckpointError: If the directory is not such a checkpoint, or its files are not what they should be.
        BaseModelError: If the base model is missing or another one.
    """
    from llm2vec_gen_st.model import LLM2VecGen

    directory = Path(path_or_id)
    if not directory.is_dir():
        directory = fetch_checkpoint(str(path_or_id), LoadOptions.among(options))
    if recognise(directory) is not Form.OFFICIAL:
        raise CheckpointError(
            f"{directory} is one of our own checkpoints; load it with LLM2VecGen({str(directory)!r})."
        )
    # A relative path may read like one of the names of models.
    return LLM2VecGen(str(directory.absolute()), **options)


@dataclass(frozen=True)
class _Adapter:
    """``encoder/adapter_config.json``: ids of the suffix rows, and the LoRA settings if there are any."""

    token_ids: list[int]
    lora: dict[str, Any] | None


def official_modules(directory: Path, options: LoadOptions) -> list[nn.Module]:
    """The two modules of a checkpoint in the authors' format; errors as :func:`import_official`."""
    run = _read_run_config(directory)
    adapter = _read_adapter_config(directory / ADAPTER_CONFIG_FILE)
    encoder = read_json_object(directory / ENCODER_CONFIG_FILE) if (directory / ENCODER_CONFIG_FILE).is_file() else {}
    compression = _compression_tokens(directory, run, len(adapter.token_ids))
    backbone = options.backbone or _load_base(directory, run, options)
    transformer = SuffixTransformer(
        backbone,
        thought_tokens=len(adapter.token_ids) - compression,
        compression_tokens=compression,
        # The authors' code always encodes with 512; our own export says so where a student has another limit.
        max_seq_length=int(run.get(MAX_SEQ_LENGTH_KEY, 512)),
        end_of_response=END_OF_RESPONSE,
        end_of_text_ids=_end_ids(encoder, backbone),
        lora=adapter.lora,
    )
    tensors, rows_key = _read_adapter_tensors(directory / ADAPTER_FILE, adapter, transformer)
    resized = tensors.get(rows_key.replace("trainable_tokens_delta", "base_layer.weight"))
    if resized is not None and options.verify_base:
        _check_base_embeddings(resized, adapter.token_ids, backbone, directory / ADAPTER_FILE)
    order = _suffix_order(adapter.token_ids, encoder, directory / ENCODER_CONFIG_FILE)
    transformer.suffix.data.copy_(tensors[rows_key][order])
    if adapter.lora is not None:
        load_lora(backbone.llm, {name: tensors[lora_key(name)] for name in lora_parameters(backbone.llm)})

    hidden = backbone.hidden_size
    recon = _read_head(directory / RECONSTRUCTION_FILE, hidden, hidden)
    align = _read_head(directory / ALIGNMENT_FILE, hidden, None)
    head = ResponseHead(
        hidden,
        hidden if align is None else len(align["bias"]),
        reconstruction=recon is not None,
        alignment=align is not None,
    )
    for layer, weights in ((head.mlp_recon, recon), (head.mlp_align, align)):
        if layer is not None and weights is not None:
            layer.load_state_dict(weights)
    return [transformer, head]


def _read_run_config(directory: Path) -> dict[str, str]:
    """``key: value`` lines as the training script appends them: a repeated key's last value holds, none is YAML."""
    # Training writes the file one level above its checkpoint folders.
    for path in (directory / RUN_CONFIG_FILE, directory.resolve().parent / RUN_CONFIG_FILE):
        if path.is_file():
            break
    else:
        return {}
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, separator, value = line.partition(":")
        if separator and key and not key[0].isspace() and not key.startswith("#"):
            found[key.strip()] = value.strip()
    # Python's None was written as a word.
    return {key: value for key, value in found.items() if value not in ("", "None")}


def _read_adapter_config(path: Path) -> _Adapter:
    config = read_json_object(path)
    kind = str(config.get("peft_type")).upper()
    if kind == "TRAINABLE_TOKENS":
        return _Adapter(_token_ids(config.get("token_indices"), path), None)
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type {config.get('peft_type')!r} is not TRAINABLE_TOKENS or LORA.")
    used = [option for option in _LORA_OPTIONS_OFF if config.get(option)]
    if used or config.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: LoRA options that cannot be read here: {', '.join(used or ['bias'])}.")
    targets, tokens = config.get("target_modules"), config.get("trainable_token_indices")
    if not isinstance(targets, list) or not isinstance(tokens, dict) or len(tokens) != 1:
        raise CheckpointError(
            f"{path}: target_modules must be a list and trainable_token_indices an object with one entry, "
            f"found {targets!r} and {tokens!r}."
        )
    numbers = {"lora_dropout": 0.0} | {key: config[key] for key in _LORA_NUMBERS if key in config}
    check_fields(str(path), numbers, _LORA_NUMBERS)
    lora = {**numbers, "target_modules": sorted(targets)}
    return _Adapter(_token_ids(next(iter(tokens.values())), path), lora)


def _token_ids(value: Any, path: Path) -> list[int]:
    if not isinstance(value, list) or not value or not all(isinstance(item, int) for item in value):
        raise CheckpointError(f"{path}: expected a list of the suffix tokens' ids, found {value!r}.")
    if len(set(value)) != len(value):
        raise CheckpointError(f"{path}: the suffix tokens' ids are not distinct: {value!r}.")
    return list(value)


def _compression_tokens(directory: Path, run: Mapping[str, str], tokens: int) -> int:
    mode = run.get("encoding_mode", DEFAULT_ENCODING_MODE)
    path = directory / PIPELINE_CONFIG_FILE
    if path.is_file():
        mode = read_json_object(path).get("encoding_mode") or mode
    found = re.fullmatch(r"last_(\d+)_tokens?", str(mode))
    count = int(found[1]) if found else 0
    if not 1 <= count <= tokens:
        raise CheckpointError(
            f"{directory}: encoding_mode {mode!r} is not last_K_tokens with K between 1 and the {tokens} suffix tokens."
        )
    return count


def _load_base(directory: Path, run: Mapping[str, str], options: LoadOptions) -> Backbone:
    base = run.get("model_name_or_path") or read_json_object(directory / ADAPTER_CONFIG_FILE).get(
        "base_model_name_or_path"
    )
    if not base:
        raise CheckpointError(
            f"{directory}: neither {RUN_CONFIG_FILE} (model_name_or_path) nor {ADAPTER_CONFIG_FILE} "
            "(base_model_name_or_path) names the base model; pass it as backbone=."
        )
    # A path was meant relative to the checkpoint.
    beside = (directory / base).resolve()
    kwargs = options.model_kwargs or {}
    if "dtype" not in kwargs and "torch_dtype" not in kwargs and run.get("torch_dtype") in _DTYPES:
        options = replace(options, model_kwargs={**kwargs, "dtype": _DTYPES[run["torch_dtype"]]})
    revision = run.get("model_revision")
    base_id = str(beside) if beside.is_dir() else str(base)
    return options.load_base(base_id, None if revision == "main" else revision)


def _end_ids(encoder: Mapping[str, Any], backbone: Backbone) -> list[int]:
    eos = encoder.get("eos_token_id")
    ids = [eos] if isinstance(eos, int) else list(eos or end_of_text_ids(backbone))
    family_end = _FAMILY_END_IDS.get(str(backbone.llm.config.model_type))
    vocabulary = len(unscaled_embedding(backbone.llm))
    if family_end is not None and family_end < vocabulary:
        ids.append(family_end)
    return sorted(set(ids))


def _suffix_order(token_ids: list[int], encoder: Mapping[str, Any], path: Path) -> list[int]:
    """Positions of the adapter's rows in the order in which the tokens follow a text."""
    sequence = encoder.get("special_tokens_ids") or token_ids
    if sorted(sequence) != sorted(token_ids):
        raise CheckpointError(f"{path}: special_tokens_ids {sequence} are not the ids of the adapter, {token_ids}.")
    return [token_ids.index(token) for token in sequence]


def lora_key(name: str) -> str:
    """Key of one of :func:`~llm2vec_gen_st.modules.lora.lora_parameters` in the adapter file."""
    return f"{KEY_PREFIX}{name}.weight"


def _read_adapter_tensors(
    path: Path, adapter: _Adapter, transformer: SuffixTransformer
) -> tuple[dict[str, torch.Tensor], str]:
    """All tensors of the adapter, checked by name and shape, and the key of the suffix rows."""
    embedding = f"{KEY_PREFIX}{embedding_name(transformer.llm)}"
    if adapter.lora is not None:
        embedding += ".token_adapter"
    rows_key, resized_key = f"{embedding}.trainable_tokens_delta", f"{embedding}.base_layer.weight"
    hidden = transformer.suffix.shape[1]
    expected: dict[str, tuple[int, ...]] = {rows_key: (len(adapter.token_ids), hidden)}
    if adapter.lora is not None:
        expected |= {lora_key(name): tuple(value.shape) for name, value in lora_parameters(transformer.llm).items()}
    try:
        with safe_open(str(path), framework="pt") as file:
            if resized_key in file.keys():  # noqa: SIM118 (not a dictionary)
                expected[resized_key] = (max(adapter.token_ids) + 1, hidden)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} could not be read as a safetensors file: {error}") from error
    return load_tensors(path, expected), rows_key


def embedding_name(llm: PreTrainedModel) -> str:
    """Name of the input embedding inside the headless model, such as ``embed_tokens``."""
    embeddings = llm.get_input_embeddings()
    return next(str(name) for name, module in llm.base_model.named_modules() if module is embeddings)


def _check_base_embeddings(resized: torch.Tensor, token_ids: list[int], backbone: Backbone, path: Path) -> None:
    """The checkpoint repeats the base model's rows of the input embedding; other rows mean another base model."""
    own = unscaled_embedding(backbone.llm)
    if own.device.type == "meta" or not own.dtype.is_floating_point:
        return
    rows = min(min(token_ids), len(own))
    for start in range(0, rows, _ROWS_COMPARED_AT_ONCE):
        stop = min(start + _ROWS_COMPARED_AT_ONCE, rows)
        # Either side may have been rounded to bfloat16, so values may differ by one step of it.
        saved = resized[start:stop].float()
        close = torch.isclose(own[start:stop].to("cpu").float(), saved, rtol=2**-7, atol=1e-6).all(dim=1)
        if not close.all():
            row = start + int((~close).nonzero()[0])
            raise BaseModelError(
                f"{path} was trained on another base model than {backbone.reference}: row {row} of its input embedding "
                "(embed_tokens.base_layer.weight) differs. Load the base model it names, or pass verify_base=False if "
                "you know that this one fits."
            )


def _read_head(path: Path, inputs: int, outputs: int | None) -> dict[str, torch.Tensor] | None:
    """Weight and bias of a pickled head; ``None`` if the checkpoint has no such stage."""
    if not path.is_file():
        return None
    try:
        # weights_only never runs code of the file; heads saved on a GPU are brought to the CPU.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # The unpickler raises its own errors, torch's, and the system's.
        raise CheckpointError(
            f"{path} was refused: it is not a torch.save file of plain tensors ({type(error).__name__}). Nothing in it "
            "was executed. If you do not know where it comes from, delete it."
        ) from error
    state = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a dictionary with a state_dict, found {type(content).__name__}.")
    expected = {"projection.weight": (outputs, inputs), "projection.bias": (outputs,)}
    problems = [f"tensor {name!r} is missing" for name in sorted(expected.keys() - state.keys())]
    problems += [f"tensor {name!r} is not known" for name in sorted(state.keys() - expected.keys())]
    if not problems:
        width = len(state["projection.bias"]) if outputs is None and state["projection.bias"].ndim == 1 else outputs
        for name, shape in {"projection.weight": (width, inputs), "projection.bias": (width,)}.items():
            if tuple(state[name].shape) != shape:
                problems.append(f"tensor {name!r} has shape {tuple(state[name].shape)}, expected {shape}")
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems) + ".")
    return {"weight": state["projection.weight"].float(), "bias": state["projection.bias"].float()}
