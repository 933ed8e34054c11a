"""What a run would train, hold in memory and cost, from the base model's config alone: no weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from llm2vec_gen_st.backbone import SMOLLM2_ID, packaged_smollm2
from llm2vec_gen_st.baselines.llm2vec import published_adapters
from llm2vec_gen_st.checkpoints.directory import MODULES_FILE
from llm2vec_gen_st.checkpoints.registry import KNOWN_MODELS
from llm2vec_gen_st.losses.reconstruction import GROUP_TOKENS
from llm2vec_gen_st.modules import ResponseHead
from llm2vec_gen_st.modules.config import read_json, read_json_object
from llm2vec_gen_st.modules.lora import add_lora, lora_parameters
from llm2vec_gen_st.teachers.sources import MINILM, SELF, packaged_minilm
from llm2vec_gen_st.text import TextTokenizer
from llm2vec_gen_st.training.data import LABEL
from llm2vec_gen_st.training.processes import on_cpu
from llm2vec_gen_st.training.recipes import Recipe
from llm2vec_gen_st.training.stages import WHOLE, stages

if TYPE_CHECKING:
    from datasets import Dataset

_CHUNK = 128
_SAMPLE = 500
# A parameter in float32, its gradient, and the two moments of AdamW.
_TRAINED_BYTES = 16
_SHORT_BYTES = 2


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row.

    Args:
        query: Of the query, instruction included, without the suffix.
        response: Of the reconstruction target.
    """

    query: float
    response: float


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage of a run.

    Args:
        name: ``whole`` or ``reconstruction``.
        steps: Its steps; ``None`` if that depends on data that is not there yet.
        tokens: Tokens through the LLM in a step on one device, each pass counted.
        flops: Floating-point operations of a step on one device.
    """

    name: str
    steps: int | None
    tokens: float
    flops: float


@dataclass(frozen=True)
class Estimate:
    """What a run would take on one device.

    Args:
        recipe: Its recipe, complete.
        embedding_dim: D.
        dimension_source: How D was found.
        trainable: Parameters that are trained.
        frozen: Parameters of the LLM.
        memory: What is counted, in bytes, at the longest rows that the recipe allows.
        lengths: Tokens of a row that the cost is taken of.
        lengths_source: Where these are from.
        rows: Training rows, documents included; ``None`` if there are none yet.
        stages: The stages.
    """

    recipe: Recipe
    embedding_dim: int
    dimension_source: str
    trainable: int
    frozen: int
    memory: dict[str, float]
    lengths: Lengths
    lengths_source: str
    rows: int | None
    stages: tuple[StageCost, ...]


def estimate(
    recipe: Recipe, rows: Dataset | None = None, *, config: PretrainedConfig | None = None, device: str | None = None
) -> Estimate:
    """Estimate a run (paper's example: about 13 M trainable parameters at Qwen3-4B).

    Cost counts two operations for each weight and token, forward and (where something before it learns) backward, and
    the attention scores; memory counts weights, gradients, optimizer and what backward needs of the LLM's layers. Not
    counted: the teacher, ridge regressions, whitening, evaluation, the optimizer's own work, and what the allocator
    keeps.

    Args:
        recipe: The recipe, its base named.
        rows: Rows of :func:`~llm2vec_gen_st.training.data.student_rows`, if there are any yet.
        config: The base model's config; read from its directory or the hub if not given.
        device: Kind of device that the run is for, ``cpu`` or another; that of this machine if not given.

    Returns:
        The estimate.

    Raises:
        ValueError: If the base's config cannot be had, or the LLM has no layers that LoRA names.
    """
    config = base_config(recipe) if config is None else config
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(config, dtype=_dtype(recipe, config))
    frozen = sum(parameter.numel() for parameter in llm.parameters())
    shape = _Shape.of(llm, lora=recipe.lora)
    dimension, source = embedding_dimension(recipe, shape.hidden, rows)
    with torch.device("meta"):
        head = ResponseHead(shape.hidden, dimension)
    heads = sum(parameter.numel() for parameter in head.parameters())
    suffix = recipe.thought_tokens + recipe.compression_tokens
    trainable = suffix * shape.hidden + heads + shape.lora_parameters
    lengths, lengths_source = _lengths(recipe, rows)
    known = rows is not None or recipe.max_steps > 0
    if rows is not None:
        parts = stages(recipe, len(rows))
    else:
        # As many rows as all steps take, for what is not known is taken to be enough.
        enough = max(1, recipe.max_steps) * recipe.batch_size * recipe.gradient_accumulation
        parts = stages(replace(recipe, epochs=1.0 if recipe.epochs else 0.0), enough)
    return Estimate(
        recipe=recipe,
        embedding_dim=dimension,
        dimension_source=source,
        trainable=trainable,
        frozen=frozen,
        memory=_memory(recipe, shape, frozen, trainable, cpu=on_cpu() if device is None else device == "cpu"),
        lengths=lengths,
        lengths_source=lengths_source,
        rows=None if rows is None else len(rows),
        stages=tuple(
            _cost(name, stage, stage.max_steps if known or name != WHOLE else None, shape, lengths, heads)
            for name, stage in parts
        ),
    )


def base_config(recipe: Recipe) -> PretrainedConfig:
    """Config of a recipe's base model: of its directory (where weights may be missing), the hub, or its cache.

    Raises:
        ValueError: If it cannot be had; names the base.
    """
    gguf = packaged_smollm2() if recipe.base == SMOLLM2_ID else None
    try:
        if gguf is not None:
            return cast(PretrainedConfig, AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name))
        return cast(PretrainedConfig, AutoConfig.from_pretrained(str(recipe.base), trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The config of the base model {recipe.base!r} could not be had: {error} Give --base a directory that "
            "holds its config.json; the weights are not needed."
        ) from error


def embedding_dimension(recipe: Recipe, hidden: int, rows: Dataset | None = None) -> tuple[int, str]:
    """Width D of the teacher's embeddings, found without loading it, and how.

    Args:
        recipe: The recipe.
        hidden: Width H of the student's LLM.
        rows: Rows that may hold labels.
    """
    if rows is not None and LABEL in rows.column_names:
        return len(rows[0][LABEL]), "column 'label'"
    teacher = recipe.teacher
    if not recipe.align_weight or teacher is None or teacher == SELF:
        return hidden, "width of the base model"
    tags = {model.base_id: model.teacher_adapters or () for model in KNOWN_MODELS}
    if teacher in tags.get(str(recipe.base), ()):
        return hidden, "width of the base model, which is the teacher's too"
    base = next((base_id for base_id, adapters in tags.items() if teacher in adapters), teacher)
    if teacher.removeprefix("sentence-transformers/") == MINILM and (folder := packaged_minilm()) is not None:
        base = str(folder)
    elif published_adapters(teacher) and Path(teacher).is_dir():
        base = str(read_json_object(Path(teacher) / "adapter_config.json").get("base_model_name_or_path"))
    try:
        width = _projected(Path(base)) or AutoConfig.from_pretrained(base, trust_remote_code=False).hidden_size
    except (OSError, ValueError, AttributeError, KeyError):
        return hidden, f"ASSUMED to be the width of the base model: the config of {teacher} could not be had"
    return int(width), f"config of {teacher}"


def _projected(folder: Path) -> int | None:
    """Width that a saved SentenceTransformer's last projection gives, if it has one."""
    if not (folder / MODULES_FILE).is_file():
        return None
    found = None
    for module in read_json(folder / MODULES_FILE):
        if str(module["type"]).endswith((".Dense", ".ResponseHead")):
            config = read_json_object(folder / module["path"] / "config.json")
            found = config.get("out_features") or config.get("embedding_dim")
    return found


def _dtype(recipe: Recipe, config: PretrainedConfig) -> torch.dtype:
    if recipe.dtype != "auto":
        return cast(torch.dtype, getattr(torch, recipe.dtype))
    return getattr(config, "dtype", None) or torch.float32


@dataclass(frozen=True)
class _Shape:
    """Sizes of the LLM that cost and memory depend on.

    Args:
        hidden: H.
        layers: Their number.
        heads: Width of all query heads together.
        head_count: Number of query heads.
        keys: Width of all key heads together.
        inner: Width of the feed-forward layers.
        vocabulary: V.
        normed: Width of normalised queries and keys; 0 if they are not.
        weights: Parameters inside the layers.
        size: Bytes of a number.
        lora_parameters: Parameters of LoRA layers.
        lora_inputs: Numbers that LoRA layers keep for backward, for each token, in all layers.
    """

    hidden: int
    layers: int
    heads: int
    head_count: int
    keys: int
    inner: int
    vocabulary: int
    normed: int
    weights: int
    size: int
    lora_parameters: int = 0
    lora_inputs: int = 0

    @classmethod
    def of(cls, llm: PreTrainedModel, *, lora: dict[str, Any] | None) -> _Shape:
        config = llm.config.get_text_config()
        hidden, heads = config.hidden_size, config.num_attention_heads
        width = getattr(config, "head_dim", None) or hidden // heads
        keys = width * (getattr(config, "num_key_value_heads", None) or heads)
        ends = {id(module.weight) for module in (llm.get_input_embeddings(), llm.get_output_embeddings())}
        normed = any(name.endswith("q_norm.weight") for name, _ in llm.named_parameters())
        shape = {
            "hidden": hidden,
            "layers": config.num_hidden_layers,
            "heads": width * heads,
            "head_count": heads,
            "keys": keys,
            "inner": getattr(config, "intermediate_size", None) or 4 * hidden,
            "vocabulary": config.vocab_size,
            "normed": width * heads + keys if normed else 0,
            "weights": sum(weight.numel() for weight in llm.parameters() if id(weight) not in ends),
            "size": llm.dtype.itemsize,
        }
        if lora is None:
            return cls(**shape)
        with torch.device("meta"):
            add_lora(llm, lora)
        matrices = lora_parameters(llm)
        # Each pair keeps its input, in float32, and what lies between its matrices.
        inputs = sum(sum(matrix.shape) for name, matrix in matrices.items() if name.endswith("lora_A"))
        return cls(**shape, lora_parameters=sum(matrix.numel() for matrix in matrices.values()), lora_inputs=inputs)

    @property
    def kept(self) -> int:
        """Bytes that backward needs of one token in one layer whose weights are frozen.

        Inputs of the two norms (and of those of queries and keys) in float32; queries, keys, values and the attention's
        result; three of the feed-forward layer. Inputs of frozen linear layers are not kept.
        """
        numbers = 2 * self.heads + 2 * self.keys + 3 * self.inner
        return 4 * (2 * self.hidden + self.normed) + self.size * numbers


def _lengths(recipe: Recipe, rows: Dataset | None) -> tuple[Lengths, str]:
    """Mean tokens of a sample of the rows, or the longest that the recipe allows."""
    room = recipe.max_seq_length - recipe.thought_tokens - recipe.compression_tokens
    longest = Lengths(room, recipe.max_response_tokens)
    if rows is None:
        return longest, "the longest that the recipe allows"
    gguf = packaged_smollm2() if recipe.base == SMOLLM2_ID else None
    source, options = (gguf.parent, {"gguf_file": gguf.name}) if gguf is not None else (recipe.base, {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except (OSError, ValueError):
        return longest, "the longest that the recipe allows; there is no tokenizer to count the rows' own"
    plain = TextTokenizer(tokenizer)
    sample = rows.select(range(0, len(rows), max(1, len(rows) // _SAMPLE)))

    def mean(texts: Sequence[str], limit: int) -> float:
        return sum(len(row.ids) for row in plain.batch(list(texts), limit)) / len(texts)

    found = Lengths(mean(sample["query"], room), mean(sample["response"], recipe.max_response_tokens))
    return found, f"mean of {len(sample)} rows"


def _student_rows(recipe: Recipe) -> int:
    """Most rows that the student reads in a batch."""
    return recipe.batch_size * (2 if recipe.margin_weight else 1)


def _reconstructed(recipe: Recipe) -> int:
    return max(1, round(recipe.recon_share * recipe.batch_size)) if recipe.recon_weight else 0


def _memory(recipe: Recipe, shape: _Shape, frozen: int, trainable: int, *, cpu: bool) -> dict[str, float]:
    """Bytes by what they are for, at the longest rows and in the stage that takes most."""
    suffix, tokens = recipe.thought_tokens + recipe.compression_tokens, recipe.max_seq_length
    rows = _student_rows(recipe)
    # Bytes of the attention weights of a query for a key, where `quick_backward` keeps them.
    weights = shape.layers * shape.head_count * shape.size if cpu and shape.size == _SHORT_BYTES else 0
    if shape.lora_parameters:
        # Everything before a LoRA layer may learn, so the whole row is kept for backward.
        kept = tokens * (shape.layers * shape.kept + 4 * shape.lora_inputs + weights * tokens)
    else:
        # Of the text only keys and values, repeated for each query head.
        kept = shape.layers * (2 * tokens * shape.heads * shape.size + suffix * shape.kept) + weights * suffix * tokens
    found = {
        f"base model's weights ({shape.size * 8} bits)": float(frozen * shape.size),
        "suffix, heads and LoRA layers, their gradients, AdamW's moments (32 bits)": float(trainable * _TRAINED_BYTES),
        "student pass: what backward needs": float(rows * kept),
    }
    busiest = max((_reconstructed(stage) for _, stage in stages(recipe, recipe.batch_size)), default=0)
    if busiest:
        each = shape.layers * shape.hidden * shape.size + shape.kept if recipe.gradient_checkpointing else 0
        each = each or shape.layers * shape.kept
        length = recipe.compression_tokens + recipe.max_response_tokens - 1
        each += length * weights // (shape.layers if recipe.gradient_checkpointing else 1)
        # Rows are run in groups, and what one group needs is gone when the next one is run.
        found["reconstruction pass: what backward needs"] = float(
            min(busiest * length, max(length, GROUP_TOKENS)) * each
        )
        found[f"logits of {_CHUNK} positions, their gradients"] = float(
            _CHUNK * shape.vocabulary * (2 * shape.size + 2 * 4)
        )
    return found


def _cost(name: str, recipe: Recipe, steps: int | None, shape: _Shape, lengths: Lengths, heads: int) -> StageCost:
    """Tokens and operations of one step."""
    suffix = recipe.thought_tokens + recipe.compression_tokens
    rows, reconstructed = _student_rows(recipe), _reconstructed(recipe)
    learns = name == WHOLE
    text_backward = learns and bool(shape.lora_parameters)
    text = _pass(shape, lengths.query, 0.0, backward=text_backward)
    own = _pass(shape, float(suffix), lengths.query, backward=learns)
    # Trained weights take their own gradient too.
    lora = (6.0 if learns else 2.0) * shape.lora_parameters * (lengths.query + suffix)
    flops = rows * (text + own + lora + 6.0 * heads * recipe.compression_tokens)
    tokens = rows * (lengths.query + suffix)
    if reconstructed:
        length = recipe.compression_tokens + lengths.response - 1
        whole = _pass(shape, length, 0.0, backward=True, again=recipe.gradient_checkpointing)
        head = 4.0 * shape.hidden * shape.vocabulary * lengths.response
        flops += reconstructed * (whole + head)
        tokens += reconstructed * length
    batches = recipe.gradient_accumulation
    return StageCost(name, steps, batches * tokens, batches * flops)


def _pass(shape: _Shape, tokens: float, before: float, *, backward: bool, again: bool = False) -> float:
    """Operations of some tokens behind others through all layers, whose weights get no gradient.

    Args:
        shape: The LLM.
        tokens: Tokens run.
        before: Tokens before them, whose keys and values are there.
        backward: Whether gradients go back through them.
        again: Whether backward runs the layers once more.
    """
    linear = 2.0 * shape.weights * tokens
    pairs = tokens * (before + tokens / 2)
    attention = 4.0 * shape.heads * shape.layers * pairs
    forward = linear + attention
    # Of the two products of attention backward takes four.
    return forward * (2 if again else 1) + (linear + 2 * attention if backward else 0.0)
