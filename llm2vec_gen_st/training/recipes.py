"""Recipes as data: the paper's numbers for each family, and those of the built-in models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llm2vec_gen_st.losses.alignment import AlignReduction
from llm2vec_gen_st.prompts import DOCUMENT, QUERY

SUFFIX_TEXT = (
    "\n\nHere is a short passage that says all there is to say about this.\nThe answer to this, in one word, is:"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, apart from data, base model and teacher.

    Args:
        thought_tokens: m (paper: 10).
        compression_tokens: n (paper: 10).
        init: ``random`` (the paper's start) or ``ridge``: suffix from ``suffix_text``, heads by ridge regression.
        ridge_rows: Rows used for the ridge regression.
        suffix_text: Text whose token embeddings start the suffix when ``init`` is ``ridge``.
        learning_rate: Peak rate of AdamW.
        align_learning_rate: Peak rate of MLP_align, if another: a head set by ridge regression needs a lower one than
            the suffix.
        recon_learning_rate: Peak rate of MLP_recon, if another.
        recon_steps: Steps after the others in which MLP_recon alone learns to reconstruct, on standardized states,
            while suffix and embeddings stay as they are (with ``recon_weight`` 0, the first steps then leave MLP_recon
            alone). The two losses cannot hurt each other this way, and steps that only align cost half.
        ridge_refit: Set MLP_align by ridge regression once more when the suffix has been trained.
        scheduler: Learning-rate schedule of the host.
        warmup_steps: Linear warm-up.
        weight_decay: Of AdamW.
        max_grad_norm: Gradient clipping.
        epochs: Passes over the rows.
        max_steps: Stops earlier if above 0.
        batch_size: Rows a step on one device.
        gradient_accumulation: Batches a step.
        max_seq_length: Query tokens, suffix included.
        max_response_tokens: Tokens of a reconstruction target.
        recon_weight: Weight of L_recon.
        recon_share: Share of each batch that is reconstructed; below 1 the estimate stays unbiased and costs less.
        align_weight: Weight of L_align.
        align_reduction: ``mean`` or ``sum`` over D.
        include: Flags of the responses that are used (see :func:`~llm2vec_gen_st.responses.read_responses`).
        query_prompts: Instructions put before queries in training; row i takes the i-th in turn.
        document_prompt: Instruction put before documents.
        document_sources: Texts that also serve as documents (``response``, ``query``, ``sentence``: the different
            sentences of responses): the instruction and the text are the input, and the text itself the target, so
            that the document route is trained too.
        center_labels: Subtract the mean teacher embedding from all of them.
        normalize_labels: Scale teacher embeddings to length 1 (after centring).
        held_out: Queries kept out of training for evaluation; at most a fifth of them.
        dtype: Dtype of the frozen LLM; suffix and heads are always float32.
        gradient_checkpointing: Recompute activations of the reconstruction pass.
        seed: Of initialisation, split and order.
        save_steps: Steps between resumable checkpoints.
        logging_steps: Steps between log lines.

    Example:
        >>> RECIPES["qwen3"].learning_rate
        0.0003
    """

    thought_tokens: int = 10
    compression_tokens: int = 10
    init: Literal["random", "ridge"] = "random"
    ridge_rows: int = 8000
    suffix_text: str = SUFFIX_TEXT
    learning_rate: float = 3e-4
    recon_learning_rate: float | None = None
    align_learning_rate: float | None = None
    recon_steps: int = 0
    ridge_refit: bool = False
    scheduler: str = "linear"
    warmup_steps: int = 100
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: float = 1.0
    max_steps: int = -1
    batch_size: int = 32
    gradient_accumulation: int = 1
    max_seq_length: int = 512
    max_response_tokens: int = 512
    recon_weight: float = 1.0
    recon_share: float = 1.0
    align_weight: float = 1.0
    align_reduction: AlignReduction = "mean"
    include: tuple[str, ...] = ("ok",)
    query_prompts: tuple[str, ...] = ("",)
    document_prompt: str = DOCUMENT
    document_sources: tuple[str, ...] = ()
    center_labels: bool = False
    normalize_labels: bool = False
    held_out: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False
    seed: int = 42
    save_steps: int = 200
    logging_steps: int = 10

    def with_overrides(self, overrides: dict[str, Any]) -> Recipe:
        """A copy with some fields replaced.

        Args:
            overrides: Field name to value; strings are converted to the field's type.

        Raises:
            ValueError: If a field is not known; lists the known ones.
        """
        kinds = get_type_hints(Recipe)
        unknown = overrides.keys() - kinds.keys()
        if unknown:
            raise ValueError(f"Unknown recipe fields {sorted(unknown)}; known are {sorted(kinds)}.")
        return replace(self, **{name: _convert(name, value, kinds[name]) for name, value in overrides.items()})


def _convert(name: str, value: Any, kind: Any) -> Any:
    """A value as the field's declared type wants it; only strings, and lists for tuples, need converting."""
    if type(None) in get_args(kind):
        # The only such fields are numbers.
        return None if value in (None, "none") else _convert(name, value, float)
    if get_origin(kind) is tuple:
        if isinstance(value, str):
            return tuple(value.split(",")) if value else ()
        return tuple(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}.")
        return value
    if not isinstance(value, str) or kind is str:
        return value
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {value!r}.")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}.") from None


_SMOLLM2 = Recipe(
    init="ridge",
    learning_rate=1e-3,
    align_learning_rate=5e-5,
    recon_learning_rate=2e-3,
    recon_steps=200,
    ridge_refit=True,
    warmup_steps=50,
    align_reduction="sum",
    ridge_rows=16000,
    max_steps=1600,
    recon_weight=0.0,
    include=("ok", "cut_off"),
    query_prompts=("", QUERY),
    # Most texts that are compared are no longer than a sentence.
    document_sources=("response", "query", "sentence"),
    # The first tokens are what a soft prompt has to say; later ones follow from them, and drown them in the mean.
    max_response_tokens=16,
    held_out=500,
    save_steps=100,
)

RECIPES: dict[str, Recipe] = {
    "qwen3": Recipe(learning_rate=3e-4, gradient_checkpointing=True),
    "qwen2.5": Recipe(learning_rate=5e-4, gradient_checkpointing=True),
    "llama3": Recipe(learning_rate=5e-4, gradient_checkpointing=True),
    "smollm2-135m": _SMOLLM2,
    "smollm2-135m-self": replace(
        _SMOLLM2,
        document_sources=("response",),
        center_labels=True,
        normalize_labels=True,
        max_steps=200,
        recon_steps=120,
        warmup_steps=20,
        ridge_rows=4000,
    ),
}


def recipe_for(base: str) -> str:
    """Name of the recipe whose family a base model belongs to.

    Args:
        base: Hub id or directory of the base model.

    Example:
        >>> recipe_for("meta-llama/Llama-3.2-1B-Instruct")
        'llama3'
    """
    lowered = base.lower()
    for fragment, name in (
        ("smollm2-135m", "smollm2-135m"),
        ("qwen3", "qwen3"),
        ("qwen2.5", "qwen2.5"),
        ("llama-3", "llama3"),
    ):
        if fragment in lowered:
            return name
    return "qwen3"
