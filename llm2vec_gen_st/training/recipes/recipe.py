"""What a recipe is: one value with everything that decides a training run, apart from the data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llm2vec_gen_st.losses.alignment import AlignReduction
from llm2vec_gen_st.losses.margin import MARGIN_THRESHOLD
from llm2vec_gen_st.prompts import DOCUMENT

SUFFIX_TEXT = (
    "\n\nHere is a short passage that says all there is to say about this.\nThe answer to this, in one word, is:"
)
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, apart from the data.

    Args:
        base: The frozen LLM, unless the caller gives another: hub id or directory.
        teacher: The teacher, unless the caller gives another: ``self``, or the name, hub id or directory of a
            SentenceTransformer, or of a published LLM2Vec adapter.
        thought_tokens: m (paper: 10).
        compression_tokens: n (paper: 10).
        init: ``random`` (the paper's start) or ``ridge``: suffix from ``suffix_text``, heads by ridge regression.
        ridge_rows: Rows used for the ridge regression.
        suffix_text: Text whose token embeddings start the suffix when ``init`` is ``ridge``.
        lora_rank: Rank r of LoRA layers that the student's own pass gets, and that are trained with the rest; 0 for
            none (paper's ablation: 8 and 32). Reconstruction, decoding and chat still use the plain LLM.
        lora_alpha: LoRA layers are scaled by ``lora_alpha / lora_rank``; twice the rank if not given, as in the paper.
        lora_targets: Names of the linear layers that they act on.
        learning_rate: Peak rate of AdamW.
        align_learning_rate: Peak rate of MLP_align, if another: a head set by ridge regression needs a lower one than
            the suffix.
        recon_learning_rate: Peak rate of MLP_recon, if another.
        recon_steps: Steps after the others in which MLP_recon alone learns to reconstruct, on standardized states,
            while suffix and embeddings stay as they are. The two losses cannot hurt each other this way, and steps that
            only align cost half.
        ridge_refit: Set MLP_align by ridge regression once more when the suffix has been trained.
        whitening: How far the student's vectors are evened out at the end of that, from 0 (not at all) to 1 (full);
            see :func:`~llm2vec_gen_st.training.whitening.whiten_alignment`. Not in the paper.
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
        recon_weight: Weight of L_recon. With 0, the alignment leaves MLP_recon alone if it learns in ``recon_steps`` or
            if ``init`` is ``ridge``, and trains it with the rest if not.
        recon_share: Share of each batch that is reconstructed; below 1 the estimate stays unbiased and costs less.
        align_weight: Weight of L_align.
        align_reduction: ``mean`` or ``sum`` over D.
        margin_weight: Weight of L_margin, which needs hard negatives: a column ``negative_query``.
        margin_threshold: Distance below which embeddings of different queries are pushed apart (paper: 10).
        include: Flags of the responses that are used (see :func:`~llm2vec_gen_st.responses.read_responses`).
        query_prompts: Instructions put before queries in training; row i takes the i-th in turn.
        document_prompt: Instruction put before documents.
        document_sources: Texts that also serve as documents (``response``, ``query``): the instruction and the text
            are the input, and the text itself the target, so that the document route is trained too.
        center_labels: Subtract the mean teacher embedding from all of them.
        normalize_labels: Scale teacher embeddings to length 1 (after centring).
        held_out: Queries kept out of training for evaluation; at most a fifth of them.
        eval_steps: Steps between evaluations during training, on held-out queries and with the caller's evaluators;
            0 for none before the end.
        dtype: Dtype of the frozen LLM; suffix and heads are always float32.
        gradient_checkpointing: Recompute activations of the reconstruction pass.
        seed: Of initialisation, split and order.
        save_steps: Steps between resumable checkpoints.
        logging_steps: Steps between log lines.

    Example:
        >>> Recipe(learning_rate=5e-4).with_overrides({"batch_size": "16"}).batch_size
        16
    """

    base: str | None = None
    teacher: str | None = None
    thought_tokens: int = 10
    compression_tokens: int = 10
    init: Literal["random", "ridge"] = "random"
    ridge_rows: int = 8000
    suffix_text: str = SUFFIX_TEXT
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] = LINEAR_LAYERS
    learning_rate: float = 3e-4
    recon_learning_rate: float | None = None
    align_learning_rate: float | None = None
    recon_steps: int = 0
    ridge_refit: bool = False
    whitening: float = 0.0
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
    margin_weight: float = 0.0
    margin_threshold: float = MARGIN_THRESHOLD
    include: tuple[str, ...] = ("ok",)
    query_prompts: tuple[str, ...] = ("",)
    document_prompt: str = DOCUMENT
    document_sources: tuple[str, ...] = ()
    center_labels: bool = False
    normalize_labels: bool = False
    held_out: int = 0
    eval_steps: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False
    seed: int = 42
    save_steps: int = 200
    logging_steps: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.whitening <= 1:
            raise ValueError(f"whitening must be from 0 to 1, got {self.whitening}.")

    @property
    def lora(self) -> dict[str, Any] | None:
        """LoRA settings of the student's first module, or ``None``.

        Example:
            >>> Recipe(lora_rank=8, lora_targets=("q_proj",)).lora
            {'r': 8, 'lora_alpha': 16.0, 'target_modules': ['q_proj']}
        """
        if not self.lora_rank:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return {"r": self.lora_rank, "lora_alpha": alpha, "target_modules": list(self.lora_targets)}

    def with_overrides(self, overrides: dict[str, Any]) -> Recipe:
        """A copy with some fields replaced.

        Args:
            overrides: Field name to value; strings are converted to the field's type, lists to tuples.

        Raises:
            ValueError: If a field is not known (lists the known ones), or a value is not of the field's type.
        """
        kinds = get_type_hints(Recipe)
        known = [field.name for field in fields(Recipe)]
        unknown = overrides.keys() - set(known)
        if unknown:
            raise ValueError(f"Unknown recipe fields {sorted(unknown)}; known are {sorted(known)}.")
        return replace(self, **{name: _convert(name, value, kinds[name]) for name, value in overrides.items()})


def _convert(name: str, value: Any, kind: Any) -> Any:
    """A value as the field's declared type wants it."""
    if type(None) in get_args(kind):
        kind = next(part for part in get_args(kind) if part is not type(None))
        return None if value in (None, "none") else _convert(name, value, kind)
    if get_origin(kind) is tuple:
        if isinstance(value, str):
            return tuple(value.split(",")) if value else ()
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ValueError(f"{name} must be a list of texts, got {value!r}.")
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}.")
        return value
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}.") from None
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        wanted = "true or false" if kind is bool else f"a {kind.__name__}"
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
    return value
