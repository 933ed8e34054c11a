"""Names of known models: what each is built on, and where its checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm2vec_gen_st.backbone import SMOLLM2_ID

PRETRAINED = Path(__file__).parent.parent / "pretrained"


@dataclass(frozen=True)
class KnownModel:
    """One known model.

    Args:
        name: Our name.
        base_id: Hub id of its base model.
        tag: How the authors spell the base model in their hub ids; ``None`` for a built-in model.
    """

    name: str
    base_id: str
    tag: str | None = None

    @property
    def hub_id(self) -> str | None:
        """Hub id of the authors' checkpoint; ``None`` for a built-in model."""
        return None if self.tag is None else f"McGill-NLP/LLM2Vec-Gen-{self.tag}"

    @property
    def folder(self) -> Path | None:
        """Folder of a built-in model inside this package; ``None`` for one on the hub."""
        return PRETRAINED / self.name if self.tag is None else None

    @property
    def teacher_adapters(self) -> tuple[str, str] | None:
        """Hub ids of the LLM2Vec teacher's two adapters (MNTP, then unsupervised SimCSE) on the same base model."""
        if self.tag is None:
            return None
        return f"McGill-NLP/LLM2Vec-{self.tag}-mntp", f"McGill-NLP/LLM2Vec-{self.tag}-mntp-unsup-simcse"


KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel("llm2vec-gen-smollm2-135m", SMOLLM2_ID),
    KnownModel("llm2vec-gen-smollm2-135m-self", SMOLLM2_ID),
    KnownModel("llm2vec-gen-qwen3-0.6b", "Qwen/Qwen3-0.6B", "Qwen3-06B"),
    KnownModel("llm2vec-gen-qwen3-1.7b", "Qwen/Qwen3-1.7B", "Qwen3-17B"),
    KnownModel("llm2vec-gen-qwen3-4b", "Qwen/Qwen3-4B", "Qwen3-4B"),
    KnownModel("llm2vec-gen-qwen3-8b", "Qwen/Qwen3-8B", "Qwen3-8B"),
    KnownModel("llm2vec-gen-qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen25-05B-Instruct"),
    KnownModel("llm2vec-gen-qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen25-15B-Instruct"),
    KnownModel("llm2vec-gen-qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "Qwen25-3B-Instruct"),
    KnownModel("llm2vec-gen-qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "Qwen25-7B-Instruct"),
    KnownModel("llm2vec-gen-llama3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "Meta-Llama-32-1B-Instruct"),
    KnownModel("llm2vec-gen-llama3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "Meta-Llama-32-3B-Instruct"),
    KnownModel("llm2vec-gen-llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-31-8B-Instruct"),
)


def find_known(name: str) -> KnownModel | None:
    """Look a name up, ignoring case.

    Args:
        name: A name, path or hub id.

    Returns:
        The known model of that name, or ``None``.

    Example:
        >>> find_known("llm2vec-gen-qwen3-4b").hub_id
        'McGill-NLP/LLM2Vec-Gen-Qwen3-4B'
    """
    return next((model for model in KNOWN_MODELS if model.name == name.lower()), None)
