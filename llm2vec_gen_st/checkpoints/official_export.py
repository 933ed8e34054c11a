"""Writing checkpoints that the authors' package reads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers.base.modules import Normalize
from torch import nn

from llm2vec_gen_st.checkpoints.directory import ADAPTER_CONFIG_FILE
from llm2vec_gen_st.checkpoints.official import (
    ADAPTER_FILE,
    ALIGNMENT_FILE,
    ENCODER_CONFIG_FILE,
    KEY_PREFIX,
    MAX_SEQ_LENGTH_KEY,
    PIPELINE_CONFIG_FILE,
    RECONSTRUCTION_FILE,
    RUN_CONFIG_FILE,
    embedding_name,
    lora_key,
)
from llm2vec_gen_st.checkpoints.vocabulary import extended_tokenizer, save_tokenizer, unscaled_embedding, write_text
from llm2vec_gen_st.files import write_atomically, write_json
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.modules.tensors import save_tensors
from llm2vec_gen_st.prompts import DEFAULT_PROMPTS
from llm2vec_gen_st.responses.generation import end_of_text_ids

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen


def export_official(model: LLM2VecGen, directory: str | Path) -> Path:
    """Write a student in the authors' format (the layout of ``McGill-NLP/LLM2Vec-Gen-*``).

    The base model is referred to by its id, not copied. The heads are ``torch.save`` files because the format demands
    it, in float32. What the format cannot say is said in a warning: of a student that normalizes its vectors it keeps
    their directions only, and instructions of its own are left out.

    Args:
        model: The student; neither it nor its tokenizer is changed.
        directory: Where to.

    Returns:
        The directory.

    Raises:
        ValueError: If the student has what the format cannot hold.
    """
    further = [type(module).__name__ for module in list(model)[2:] if not isinstance(module, Normalize)]
    if further:
        raise ValueError(
            "The authors' format holds a suffix and two heads only; this student has further modules: "
            + ", ".join(further)
        )
    if len(model) > 2:
        warnings.warn(
            "The authors' format cannot say that vectors are normalized: from there they have the same directions, and "
            "so the same cosines, but other lengths.",
            stacklevel=2,
        )
    if model.prompts != DEFAULT_PROMPTS or model.default_prompt_name is not None:
        warnings.warn(
            "The authors' format has no place for instructions: from there the student has the usual ones, and none is "
            "its default. Pass prompts and default_prompt_name where it is loaded.",
            stacklevel=2,
        )
    directory = Path(directory)
    (directory / "encoder").mkdir(parents=True, exist_ok=True)
    transformer, tokenizer = model.suffix_transformer, model.backbone.tokenizer
    llm = model.llm
    unscaled_embedding(llm)
    names = [f"<question{number + 1}>" for number in range(transformer.suffix_length)]
    core, ids = extended_tokenizer(tokenizer, names)
    save_tokenizer(
        directory,
        core,
        tokenizer,
        {
            "additional_special_tokens": names,
            "padding_side": "left",
            "model_max_length": int(min(getattr(tokenizer, "model_max_length", 10**6), 10**6)),
        },
    )
    if tokenizer.chat_template:
        write_text(directory / "chat_template.jinja", str(tokenizer.chat_template))

    embedding = embedding_name(llm)
    tensors = {f"{embedding}{'.token_adapter' if transformer.lora else ''}.trainable_tokens_delta": transformer.suffix}
    tensors = {KEY_PREFIX + name: tensor for name, tensor in tensors.items()}
    if transformer.lora:
        tensors |= {lora_key(name): parameter for name, parameter in lora_parameters(llm).items()}
    save_tensors(directory / ADAPTER_FILE, tensors)
    write_json(directory / ADAPTER_CONFIG_FILE, _adapter_config(model, embedding, ids))
    write_json(directory / ENCODER_CONFIG_FILE, _encoder_config(model, core.get_vocab_size(), ids))

    head = model.response_head
    for file, layer in ((RECONSTRUCTION_FILE, head.mlp_recon), (ALIGNMENT_FILE, head.mlp_align)):
        # A stage that does not exist must not be found in a folder that is written again.
        (directory / file).unlink(missing_ok=True)
        if layer is not None:
            _save_head(directory / file, layer)

    mode = f"last_{transformer.compression_tokens}_tokens"
    write_json(directory / PIPELINE_CONFIG_FILE, {"encoding_mode": mode, "save_decoder": False})
    run: dict[str, Any] = {
        "model_name_or_path": transformer.base.id,
        "model_revision": transformer.base.revision or "main",
        "tokenizer_name": None,
        "tokenizer_padding_side": "left",
        "torch_dtype": _dtype_name(llm.dtype),
        "special_tokens": names,
        "special_token_config_name": f"total_{len(names)}",
        "max_input_length": transformer.max_seq_length,
        MAX_SEQ_LENGTH_KEY: transformer.max_seq_length,
        "add_reconstruction_mlp": head.mlp_recon is not None,
        "add_alignment_mlp": head.mlp_align is not None,
        "encoding_mode": mode,
        "use_peft_for_encoder": bool(transformer.lora),
    }
    lines = "".join(f"{key}: {value}\n" for key, value in run.items())
    write_text(directory / RUN_CONFIG_FILE, lines)
    return directory


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _adapter_config(model: LLM2VecGen, embedding: str, ids: list[int]) -> dict[str, Any]:
    transformer = model.suffix_transformer
    headless = model.llm.base_model
    config: dict[str, Any] = {
        "auto_mapping": {"base_model_class": type(headless).__name__, "parent_library": type(headless).__module__},
        "base_model_name_or_path": transformer.base.id,
        "inference_mode": True,
        "revision": None,
        "task_type": None,
    }
    if not transformer.lora:
        return {**config, "peft_type": "TRAINABLE_TOKENS", "target_modules": embedding, "token_indices": ids}
    return {
        **config,
        "peft_type": "LORA",
        "bias": "none",
        "r": transformer.lora["r"],
        "lora_alpha": transformer.lora["lora_alpha"],
        "lora_dropout": transformer.lora.get("lora_dropout", 0.0),
        "target_modules": list(transformer.lora["target_modules"]),
        "trainable_token_indices": {embedding: ids},
    }


def _encoder_config(model: LLM2VecGen, vocabulary: int, ids: list[int]) -> dict[str, Any]:
    transformer = model.suffix_transformer
    tokenizer = model.backbone.tokenizer
    config: dict[str, Any] = model.llm.config.to_dict()
    config.pop("quantization_config", None)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        # transformers 4, which the authors' package needs, has these two instead.
        config["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
    ends = transformer.end_of_text_ids
    ends = end_of_text_ids(transformer.backbone) if ends is None else ends
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return {
        **config,
        "dtype": _dtype_name(model.llm.dtype),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": pad,
        "num_special_tokens": len(ids),
        "special_tokens": ids,
        "special_tokens_ids": ids,
        "tokenizer_original_num_tokens": vocabulary - len(ids),
        "num_tokens": len(unscaled_embedding(model.llm)) + len(ids),
        "vocab_size": vocabulary,
    }


def _save_head(path: Path, layer: nn.Linear) -> None:
    # Whatever the LLM's: heads may undo each other's large values, and rounded they would not any more.
    dtype = torch.float32
    state = {
        "projection.weight": layer.weight.detach().to("cpu", dtype).clone(),
        "projection.bias": layer.bias.detach().to("cpu", dtype).clone(),
    }
    content = {
        "state_dict": state,
        "config": {
            "input_dim": layer.in_features,
            "output_dim": layer.out_features,
            "dtype": str(dtype),
            "size": 1,
            "pooling_mode": "linear",
        },
    }
    write_atomically(path, lambda temporary: torch.save(content, temporary))
