"""Export to stock sentence-transformers modules: the student embeds where this package is not installed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModel, PreTrainedModel

from llm2vec_gen_st.checkpoints.card import native_card
from llm2vec_gen_st.checkpoints.directory import HOST_CONFIG_FILE, MODULES_FILE
from llm2vec_gen_st.checkpoints.vocabulary import extended_tokenizer, save_tokenizer, unscaled_embedding, write_text
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.modules.lora import weights_without_lora

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

# Plain text only: with a chat template in reach the host would wrap every text into a message.
_TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def export_native(model: LLM2VecGen, directory: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write a student as stock sentence-transformers modules, to be loaded with ``SentenceTransformer(directory)``.

    The suffix becomes tokens that the tokenizer appends by itself; the host's modules then apply both heads folded
    into one (``Dense``), keep the compression tokens only (``WordWeights``) and average them (``Pooling``). The LLM
    is copied into the directory, with LoRA layers merged. Such a model embeds; to decode, keep the student.

    Args:
        model: The student; neither it nor its tokenizer is changed.
        directory: Where to.
        dtype: Dtype of the saved weights; ``None`` keeps the LLM's. The heads are saved in float32.

    Returns:
        The directory.

    Raises:
        ValueError: If the student has what stock modules cannot hold.
    """
    further = [type(module).__name__ for module in list(model)[2:] if not isinstance(module, Normalize)]
    if further:
        raise ValueError(f"Stock modules cannot hold this student's further modules: {', '.join(further)}.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    transformer, tokenizer = model.suffix_transformer, model.backbone.tokenizer
    names = [f"<|llm2vec-gen-thought-{number + 1}|>" for number in range(transformer.thought_tokens)]
    names += [f"<|llm2vec-gen-compression-{number + 1}|>" for number in range(transformer.compression_tokens)]
    core, ids = extended_tokenizer(tokenizer, names)
    vocabulary = _save_llm(model, directory, ids, dtype)
    _append_suffix(core, names, ids)
    pad = {} if tokenizer.pad_token or tokenizer.eos_token else {"pad_token": names[-1]}
    save_tokenizer(
        directory,
        core,
        tokenizer,
        {
            "model_max_length": transformer.max_seq_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "right",
            # Special tokens spelled in a text stay text, as in the student.
            "split_special_tokens": True,
            **pad,
        },
    )
    write_json(
        directory / Transformer.config_file_name,
        {
            "transformer_task": "feature-extraction",
            "modality_config": _TEXT_ONLY,
            "module_output_name": "token_embeddings",
            # WordWeights needs rows, not one flat sequence.
            "unpad_inputs": False,
        },
    )

    rows = [""] * vocabulary
    for token, name in zip(ids, names, strict=True):
        rows[token] = name
    kept = dict.fromkeys(names[transformer.thought_tokens :], 1.0)
    hidden = model.response_head.hidden_size
    weight, bias = (value.detach().cpu() for value in model.response_head.folded())
    # The map is affine, so it may come before the mean; there every module gets the dtype it has, also in bfloat16
    # (WordWeights gives float32, which a Dense behind it would refuse).
    dense = Dense(
        hidden,
        len(bias),
        activation_function=nn.Identity(),
        init_weight=weight.clone(),
        init_bias=bias.clone(),
        module_input_name="token_embeddings",
    )
    stock: list[Any] = [dense, WordWeights(rows, kept, unknown_word_weight=0.0), Pooling(len(bias), "mean")]
    stock += [Normalize() for module in list(model)[2:]]
    _save_modules(model, directory, stock)
    return directory


def _save_llm(model: LLM2VecGen, directory: Path, ids: list[int], dtype: torch.dtype | None) -> int:
    """Write the headless LLM with the suffix as embedding rows; returns the number of rows."""
    llm = model.llm
    headless: Any = llm.base_model
    if any(not weight.is_floating_point() or weight.device.type == "meta" for weight in headless.parameters()):
        raise ValueError("The LLM's weights are quantized or offloaded; load it in float32 or bfloat16 to export it.")
    _check_auto_class(llm)
    own = unscaled_embedding(llm)
    weights = weights_without_lora(headless, merge=model.suffix_transformer.lora is not None)
    vocabulary = max(len(own), max(ids) + 1)
    rows = own.new_zeros(vocabulary, own.shape[1])
    rows[: len(own)] = own
    rows[torch.tensor(ids)] = model.suffix_transformer.suffix.detach().to(rows)
    key = next(name for name, tensor in headless.state_dict().items() if tensor.data_ptr() == own.data_ptr())
    weights[key] = rows
    dtype = dtype or llm.dtype
    for name, tensor in weights.items():
        weights[name] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
    save_torch_state_dict(weights, directory)

    config = deepcopy(llm.config)
    config.vocab_size = vocabulary
    config.architectures = [type(headless).__name__]
    config.dtype = dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(directory)
    return vocabulary


def _check_auto_class(llm: PreTrainedModel) -> None:
    with torch.device("meta"):
        loaded = AutoModel.from_config(llm.config)
    if type(loaded) is not type(llm.base_model):
        raise ValueError(
            f"transformers loads {type(loaded).__name__} for this config, but the student's LLM is built on "
            f"{type(llm.base_model).__name__}, so stock modules cannot hold it."
        )


def _append_suffix(core: Tokenizer, names: list[str], ids: list[int]) -> None:
    """Let the tokenizer put the suffix behind every text; truncation then makes room for it by itself."""
    plain = core.encode("a", add_special_tokens=False).ids
    whole = core.encode("a", add_special_tokens=True).ids
    front = whole[: len(whole) - len(plain)]
    if whole != [*front, *plain]:
        raise ValueError("This tokenizer puts special tokens behind a text, where the suffix has to be.")
    front_names = [str(core.id_to_token(token)) for token in front]
    # Names of tokens may hold characters that the template's short form reads as its own, so ids are given apart.
    core.post_processor = TemplateProcessing(
        single=[*front_names, "$A", *names],
        special_tokens=list(dict(zip([*front_names, *names], [*front, *ids], strict=True)).items()),
    )


def _save_modules(model: LLM2VecGen, directory: Path, stock: list[Any]) -> None:
    entries = [{"idx": 0, "name": "0", "path": "", "type": _reference(Transformer)}]
    for number, module in enumerate(stock, 1):
        path = f"{number}_{type(module).__name__}"
        (directory / path).mkdir(exist_ok=True)
        module.save(str(directory / path))
        entries.append({"idx": number, "name": str(number), "path": path, "type": _reference(type(module))})
    write_json(directory / MODULES_FILE, entries)
    config = model._get_model_config()
    # Nothing of ours is needed to load this form.
    config.pop("requirements", None)
    write_json(directory / HOST_CONFIG_FILE, config)
    write_text(directory / "README.md", native_card(model))


def _reference(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
