"""HyDE (Gao et al. 2022): a query's vector is the mean of its own and those of answers that an LLM made up."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.answers import AnswerWriter
from llm2vec_gen_st.baselines.llm_module import CONFIG_FILE, LLMModule, as_backbone, as_sentence_transformer
from llm2vec_gen_st.baselines.pooling import mean_pooling
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.config import check_fields, find_file
from llm2vec_gen_st.modules.frozen_llm import FORMAT_VERSION, load_referenced, read_config
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.prompts import QUERY
from llm2vec_gen_st.responses.generation import GenerationSettings
from llm2vec_gen_st.teachers.sources import MINILM, packaged_minilm

ENCODER_FOLDER = "encoder"

_KINDS = {
    "answers": "a whole number",
    "generation": "an object",
    "cache": "text or null",
}
_GENERATION_KINDS = {
    "max_new_tokens": "a whole number",
    "temperature": "a number",
    "top_p": "a number",
    "system": "text or null",
    "max_query_tokens": "a whole number",
    "seed": "a whole number",
}


class HyDE(InputModule):
    """The mean of the encoder's vectors of a query and of N answers to it; documents are encoded as answers are.

    The host's prompt of a query is the instruction that the LLM is asked with; the encoder itself gets its own prompts,
    for queries as queries, for answers and documents as documents. A document's prompt given to the host would set
    documents apart from answers, so it is not used. A text is a document if ``encode_document`` is called.

    Args:
        writer: Writes and keeps the answers.
        encoder: Any SentenceTransformer.
        answers: N.

    Raises:
        ValueError: If N is not positive, or all N answers would be the same one.
    """

    config_file_name = CONFIG_FILE
    tokenizer: PreTrainedTokenizerBase

    def __init__(self, writer: AnswerWriter, encoder: SentenceTransformer, answers: int) -> None:
        super().__init__()
        if answers < 1:
            raise ValueError(f"HyDE needs at least 1 answer a query, got {answers}.")
        if answers > 1 and writer.settings.temperature == 0:
            raise ValueError(
                f"At temperature 0 all {answers} answers would be the same; use answers=1 or a temperature above 0."
            )
        self.writer = writer
        self.answers = answers
        self.encoder = encoder
        # Seen by the host as part of the model, so that it is moved with it.
        self.llm = writer.backbone.llm
        self.tokenizer = writer.backbone.tokenizer

    @property
    def max_seq_length(self) -> int | None:
        """Longest text that the encoder reads, in tokens."""
        return self.encoder.max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.encoder.max_seq_length = value

    def get_embedding_dimension(self) -> int | None:
        """Width of the encoder's embeddings."""
        return self.encoder.get_embedding_dimension()

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, task: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Keep the texts as they are: what is encoded is known only once answers are written.

        Args:
            inputs: B texts.
            prompt: Instruction.
            task: ``"document"`` for documents.
            **kwargs: Not used.
        """
        if task == "document" and prompt:
            warnings.warn(
                f"HyDE encodes documents as it encodes answers, behind the encoder's own instruction; {prompt!r} is "
                "not used. To encode both behind it, put it into the encoder's prompts.",
                stacklevel=2,
            )
        return {"texts": list(inputs), "prompt": prompt or "", "document": task == "document"}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``sentence_embedding`` (B, D) in float32 to the features."""
        features["sentence_embedding"] = (
            self.encode_documents(features["texts"])
            if features["document"]
            else self.encode_queries(features["texts"], features["prompt"])
        )
        return features

    def encode_documents(self, texts: Sequence[str]) -> torch.Tensor:
        """Documents or answers (B, D), behind the encoder's own instruction for documents, if it has one."""
        found: torch.Tensor = self.encoder.encode_document(list(texts), convert_to_tensor=True, show_progress_bar=False)
        return found.float()

    def encode_queries(self, texts: Sequence[str], prompt: str) -> torch.Tensor:
        """Means (B, D) of each query and its answers; an empty answer says nothing and is left out."""
        written = self.writer.answers([prompt + text for text in texts], self.answers)
        queries: torch.Tensor = self.encoder.encode_query(list(texts), convert_to_tensor=True, show_progress_bar=False)
        kept = [(row, answer) for row, answers in enumerate(written) for answer in answers if answer]
        total, count = queries.float(), torch.ones(len(texts), 1, device=queries.device)
        if kept:
            rows = torch.tensor([row for row, _ in kept], device=queries.device)
            vectors = self.encode_documents([answer for _, answer in kept])
            total = total.index_add(0, rows, vectors)
            count = count.index_add(0, rows, torch.ones(len(kept), 1, device=queries.device))
        return total / count

    def get_config_dict(self) -> dict[str, Any]:
        """The LLM that answers, how many answers, and how they are written."""
        return {
            "base": asdict(self.writer.backbone.reference),
            "answers": self.answers,
            "generation": asdict(self.writer.settings),
        }

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write config and encoder; neither the LLM nor the answers."""
        folder = Path(output_path)
        cache = self.writer.cache
        own = {"format_version": FORMAT_VERSION, "cache": None if cache is None else str(cache.resolve())}
        write_json(folder / CONFIG_FILE, {**own, **self.get_config_dict()})
        self.encoder.save_pretrained(str(folder / ENCODER_FOLDER), create_model_card=False)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Self:
        """Read config and encoder, and the LLM that answers; an encoder on the same LLM shares it.

        Args:
            model_name_or_path: Directory of the checkpoint.
            subfolder: Folder inside it.
            **kwargs: Options as in :class:`~llm2vec_gen_st.load_options.LoadOptions`; others of the host are not used.

        Raises:
            CheckpointError: If the files are not what they should be.
            BaseModelError: If the base model is missing or another one.
        """
        options = LoadOptions.among(kwargs)
        path = find_file(cls, model_name_or_path, CONFIG_FILE, subfolder, options)
        expected, config = read_config(path, _KINDS)
        check_fields(f"{path}, generation", config["generation"], _GENERATION_KINDS)
        # Our own baselines are classes of a package other than the host's, which it would ask about.
        encoder = SentenceTransformer(str(path.parent / ENCODER_FOLDER), trust_remote_code=True)
        first = encoder[0]
        if isinstance(first, LLMModule) and first.lora is None and first.base == expected:
            backbone = first.backbone
        else:
            backbone = load_referenced(expected, path.parent, options)
        writer = AnswerWriter(backbone, GenerationSettings(**config["generation"]), config["cache"])
        try:
            return cls(writer, encoder, config["answers"])
        except ValueError as error:
            raise CheckpointError(f"{path}: no baseline can be made of this: {error}") from error


def hyde(
    base: str | Backbone,
    *,
    encoder: str | SentenceTransformer | None = None,
    answers: int = 8,
    max_new_tokens: int = 500,
    temperature: float = 0.7,
    seed: int = 0,
    cache: str | Path | None = None,
    batch_size: int = 16,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """HyDE with any LLM and any encoder (Gao et al. 2022).

    Args:
        base: The LLM that answers: hub id, directory, or loaded backbone.
        encoder: Name, directory or loaded SentenceTransformer; mean pooling of the same LLM if not given.
        answers: N, answers a query.
        max_new_tokens: Longest answer in tokens.
        temperature: Sampling temperature; 0 only with one answer.
        seed: Seed of the sampling.
        cache: SQLite file that keeps the answers; ``None`` keeps them in memory.
        batch_size: Answers written at once.
        prompts: Instructions by name; the one of a query is what the LLM is asked with, one of documents is not used.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.

    Returns:
        The encoder; its embeddings have the inner encoder's width.

    Raises:
        ValueError: If several answers are asked for at temperature 0.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> model = hyde(tiny_backbone(), answers=2, max_new_tokens=4, device="cpu")
        >>> model.encode_query(["who makes honey?"]).shape
        (1, 64)
    """
    backbone = as_backbone(base, model_kwargs)
    if encoder is None:
        encoder = mean_pooling(backbone, device=device, model_kwargs=model_kwargs)
    elif isinstance(encoder, str):
        packaged = packaged_minilm() if encoder.removeprefix("sentence-transformers/") == MINILM else None
        encoder = SentenceTransformer(str(packaged or encoder), device=device)
    settings = GenerationSettings(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    module = HyDE(AnswerWriter(backbone, settings, cache, batch_size=batch_size), encoder, answers)
    asked = {"query": QUERY, "document": "", **(prompts or {})}
    return as_sentence_transformer(module, prompts=asked, device=device, model_kwargs=model_kwargs)
