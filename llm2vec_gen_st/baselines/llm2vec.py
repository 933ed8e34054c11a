"""LLM2Vec (BehnamGhader et al. 2024): a decoder LLM that attends in both directions, mean-pooled over the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.bidirectional import bidirectional_states, check_bidirectional
from llm2vec_gen_st.baselines.llm_module import Layout, LLMModule, as_backbone, as_sentence_transformer
from llm2vec_gen_st.baselines.loading import is_baseline, load_baseline
from llm2vec_gen_st.baselines.lora_stack import ADAPTER_CONFIG_FILE, ADAPTER_FILE, carry, read_adapter, stack
from llm2vec_gen_st.modules.lora import lora_removed_on_failure
from llm2vec_gen_st.modules.tensors import CheckpointError

MNTP = "-mntp"
SECOND_STAGES = ("-unsup-simcse", "-supervised")
PUBLISHED = "McGill-NLP/LLM2Vec-"

# The authors' code writes these around instruction and text, for these base models only.
_WRAPS = {
    "meta-llama/Meta-Llama-3-8B-Instruct": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistralai/Mistral-7B-Instruct-v0.2": ("[INST] ", " [/INST]"),
    "meta-llama/Llama-2-7b-chat-hf": ("[INST] ", " [/INST]"),
}


class LLM2VecTransformer(LLMModule):
    """Instruction and text in one pass in which each token sees all others; the mean over the text's tokens.

    Args:
        backbone: The LLM; it stays causal for everyone else.
        before: Chat markup in front of the instruction; its control tokens are read as such.
        after: Chat markup behind the text; pooled with the text, as the authors do.
        **options: As in :class:`~llm2vec_gen_st.baselines.llm_module.LLMModule`.

    Raises:
        ValueError: If the LLM cannot attend in both directions.
    """

    setting_kinds: ClassVar = {**LLMModule.setting_kinds, "before": "text", "after": "text"}

    def __init__(self, backbone: Backbone, *, before: str = "", after: str = "", **options: Any) -> None:
        check_bidirectional(backbone.llm)
        super().__init__(backbone, **options)
        self.before = before
        self.after = after
        self.attention_dropout = 0.0
        """Dropout of the attention weights in training mode; SimCSE's only noise."""

    def layout(self, text: str, prompt: str) -> Layout:
        """Instruction and text; the text is pooled."""
        if not self.before and not self.after:
            return self.instructed(text, prompt, self.max_seq_length)
        opening = list(self.tokenizer(self.before)["input_ids"])
        closing = list(self.tokenizer(self.after, add_special_tokens=False)["input_ids"])
        room = self.max_seq_length - len(opening) - len(closing)
        ids, cut = self.text_ids(prompt + text, room)
        plain = self.instructed(text, prompt, room)
        pooled = min(len(ids), plain.stop - plain.first)
        whole = self.some_ids([*opening, *ids, *closing])
        return Layout(whole, len(whole) - max(1, pooled + len(closing)), len(whole), cut)

    def hidden_states(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Last hidden states (b, T, H); each token sees its whole row."""
        with self._noise():
            return bidirectional_states(self.llm, ids, lengths)

    @contextmanager
    def pass_state(self) -> Iterator[None]:
        """A block in which the LLM carries the LoRA weights and drops attention weights."""
        with super().pass_state(), self._noise():
            yield

    def _noise(self) -> AbstractContextManager[None]:
        return attention_dropout(self.llm, self.attention_dropout if self.training else 0.0)


@contextmanager
def attention_dropout(llm: nn.Module, share: float) -> Iterator[None]:
    """Run a block in which attention weights are dropped, and nothing else.

    Args:
        llm: The causal LM.
        share: Share of the weights dropped; 0 for none.

    Raises:
        ValueError: If the LLM's attention layers know no dropout.
    """
    layers = [module for module in llm.modules() if hasattr(module, "attention_dropout")] if share else []
    if share and not layers:
        raise ValueError(f"{type(llm).__name__} has no attention dropout, which SimCSE needs as its noise.")
    before = [(layer, layer.attention_dropout, layer.training) for layer in layers]
    try:
        for layer in layers:
            layer.attention_dropout, layer.training = share, True  # type: ignore[assignment]
        yield
    finally:
        for layer, kept, training in before:
            layer.attention_dropout, layer.training = kept, training


def llm2vec(
    base_or_path: str | Path | Backbone,
    *,
    adapters: Sequence[str | Path] | None = None,
    base: str | Backbone | None = None,
    max_seq_length: int = 512,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """LLM2Vec: of a plain LLM, of the authors' published adapters, or trained here.

    Published adapters come in two folders: ``…-mntp`` and ``…-mntp-unsup-simcse``, the second on top of the first.
    Given the second, the first is found beside it by its name.

    Args:
        base_or_path: A backbone, or hub id or directory of a base model (not trained: the LLM in both directions); a
            PEFT folder or hub id of a published adapter; or a directory that
            :func:`~llm2vec_gen_st.baselines.train_llm2vec` wrote.
        adapters: PEFT folders or hub ids to put on the base model, in order, instead of those found by name.
        base: Another place of the base model than the one a checkpoint or adapter names, or a loaded backbone.
        max_seq_length: Longest input in tokens; a directory that training wrote has its own.
        prompts: Instructions by name.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.

    Returns:
        The encoder; its embeddings have the LLM's width H.

    Raises:
        CheckpointError: If an adapter is not what it should be; names file and tensor.
        BaseModelError: If the base model is missing, or another one than a checkpoint was trained on.
        ValueError: If the LLM cannot attend in both directions.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> llm2vec(tiny_backbone(), device="cpu").encode(["bees"]).shape
        (1, 64)
    """
    if not isinstance(base_or_path, Backbone) and adapters is None:
        if is_baseline(base_or_path):
            return load_baseline(
                base_or_path, LLM2VecTransformer, base=base, prompts=prompts, device=device, model_kwargs=model_kwargs
            )
        adapters = published_adapters(str(base_or_path))
    elif not isinstance(base_or_path, Backbone):
        base = base if base is not None else str(base_or_path)
    folders = [adapter_folder(str(adapter)) for adapter in adapters or ()]
    parts = [read_adapter(folder) for folder in folders]
    if isinstance(base_or_path, Backbone):
        base = base_or_path
    elif base is None:
        base = next((named for _, named in parts if named is not None), None) if parts else str(base_or_path)
        if base is None:
            raise CheckpointError(f"{folders[0] / ADAPTER_CONFIG_FILE} names no base model; pass base=...")
    backbone = as_backbone(base, model_kwargs)
    before, after = _WRAPS.get(backbone.reference.id, ("", ""))
    with lora_removed_on_failure(backbone.llm):
        module = LLM2VecTransformer(backbone, before=before, after=after, max_seq_length=max_seq_length)
        if parts:
            together = stack([part for part, _ in parts])
            module.lora = carry(module.llm, together, " and ".join(str(folder) for folder in folders))
    return as_sentence_transformer(module, prompts=prompts, device=device, model_kwargs=model_kwargs)


def published_adapters(name: str) -> list[str]:
    """The adapters that a name stands for, in the order in which they go onto the base model.

    Args:
        name: Directory or hub id.

    Returns:
        Directories or hub ids; none if it is no adapter but a base model.

    Example:
        >>> published_adapters("McGill-NLP/LLM2Vec-Qwen3-4B-mntp-unsup-simcse")
        ['McGill-NLP/LLM2Vec-Qwen3-4B-mntp', 'McGill-NLP/LLM2Vec-Qwen3-4B-mntp-unsup-simcse']
        >>> published_adapters("Qwen/Qwen3-4B")
        []
    """
    folder = Path(name)
    if folder.is_dir() and not (folder / ADAPTER_CONFIG_FILE).is_file():
        return []
    if not folder.is_dir() and not name.startswith(PUBLISHED):
        return []
    trimmed = name.rstrip("/")
    first = next((trimmed.removesuffix(stage) for stage in SECOND_STAGES if trimmed.endswith(stage)), None)
    if first is None or not first.endswith(MNTP):
        return [trimmed]
    if folder.is_dir() and not Path(first).is_dir():
        raise CheckpointError(
            f"{name} goes on top of the MNTP adapter {Path(first).name}, which is not beside it. Put it there, or pass "
            "adapters=[mntp_folder, simcse_folder] with the base model."
        )
    return [first, trimmed]


def adapter_folder(name: str) -> Path:
    """Directory of a PEFT adapter, downloaded if it is a hub id; only its config and safetensors file are fetched.

    Raises:
        CheckpointError: If it cannot be had; names it.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[ADAPTER_CONFIG_FILE, ADAPTER_FILE]))
    except Exception as error:  # The hub client raises its own errors, the HTTP library's, and the system's.
        raise CheckpointError(
            f"{name!r} is no directory here, and the Hugging Face hub or its local cache did not give it either: "
            f"{type(error).__name__}: {error}"
        ) from error
