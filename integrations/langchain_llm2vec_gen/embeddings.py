"""LangChain embeddings: queries and documents, each with an instruction of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings

from llm2vec_gen_st.fingerprint import student_fingerprint
from llm2vec_gen_st.model import LLM2VecGen


class LLM2VecGenEmbeddings(Embeddings):
    """Embed queries and documents with an LLM2Vec-Gen model, for LangChain.

    Any number of threads may use one at once. The async methods encode in a thread, so the event loop goes on.

    Args:
        model: A name, directory or hub id that :class:`~llm2vec_gen_st.LLM2VecGen` takes, or a loaded model.
        batch_size: Texts run at once.
        show_progress_bar: Whether a progress bar is shown while documents are embedded.
        query_prompt_name: Name of the queries' instruction in ``model.prompts``; ``None`` for no instruction.
        document_prompt_name: Name of the documents' instruction.
        model_kwargs: How the base model of a named model is loaded (``dtype``, ``device_map``, ...).

    Raises:
        ValueError: If the model has no instruction of such a name, or is loaded already and there are ``model_kwargs``.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> embeddings = LLM2VecGenEmbeddings(tiny_model())
        >>> len(embeddings.embed_query("Where do polar bears live?"))
        48
    """

    def __init__(
        self,
        model: str | LLM2VecGen = "llm2vec-gen-smollm2-135m",
        *,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        query_prompt_name: str | None = "query",
        document_prompt_name: str | None = "document",
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if isinstance(model, LLM2VecGen) and model_kwargs:
            raise ValueError("model_kwargs say how a named model is loaded, and this model is loaded already.")
        self._model = model if isinstance(model, LLM2VecGen) else LLM2VecGen(model, model_kwargs=model_kwargs)
        self.batch_size = batch_size
        self.show_progress_bar = show_progress_bar
        self.query_prompt_name = query_prompt_name
        self.document_prompt_name = document_prompt_name
        self._instructions()

    @property
    def model(self) -> LLM2VecGen:
        """The model that embeds."""
        return self._model

    def embed_query(self, text: str) -> list[float]:
        """Embed one query, with the queries' instruction.

        Args:
            text: The query.

        Returns:
            D floats.

        Raises:
            TypeError: If it is not a string.
            FloatingPointError: If the embedding is not finite.
        """
        found: list[float] = self._encode([text], self._instruction(self.query_prompt_name), progress=False)[0].tolist()
        return found

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents, with the documents' instruction.

        Args:
            texts: N texts.

        Returns:
            N lists of D floats.

        Raises:
            TypeError: If an item is not a string; names its position.
            FloatingPointError: If an embedding is not finite; names the text's position.
        """
        # Row by row: one conversion of the whole array would keep all other threads waiting.
        return [row.tolist() for row in self.embed_documents_array(texts)]

    def embed_documents_array(self, texts: Iterable[str]) -> np.ndarray:
        """Embed documents as one array, without a Python object for each number.

        Args:
            texts: N texts.

        Returns:
            (N, D) float32.

        Raises:
            TypeError: If an item is not a string; names its position.
            FloatingPointError: If an embedding is not finite; names the text's position.

        Example:
            >>> from llm2vec_gen_st.testing import tiny_model
            >>> LLM2VecGenEmbeddings(tiny_model()).embed_documents_array(["Bees make honey.", ""]).shape
            (2, 48)
        """
        instruction = self._instruction(self.document_prompt_name)
        return self._encode(list(texts), instruction, progress=self.show_progress_bar)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stay the same as long as the vectors do.

        They cover the base model's fingerprint, suffix, heads, LoRA layers, lengths, both instructions, and what is
        done to a vector behind the heads; not the dtype and the device, which round vectors a little differently.

        Example:
            >>> from llm2vec_gen_st.testing import tiny_model
            >>> one, same, other = (LLM2VecGenEmbeddings(tiny_model(seed=seed)).fingerprint for seed in (0, 0, 1))
            >>> one == same, one == other
            (True, False)
        """
        return student_fingerprint(self.model, self._instructions())

    def _instructions(self) -> tuple[str, str]:
        """Instruction of queries and of documents; looked up each time, as the model's prompts may be changed."""
        return self._instruction(self.query_prompt_name), self._instruction(self.document_prompt_name)

    def _instruction(self, name: str | None) -> str:
        prompts = self.model.prompts
        if name is not None and name not in prompts:
            raise ValueError(f"The model has no instruction {name!r}; it has {', '.join(sorted(prompts))}.")
        return "" if name is None else (prompts[name] or "")

    def _encode(self, texts: list[str], instruction: str, *, progress: bool) -> np.ndarray:
        found: np.ndarray = self.model.encode(
            texts, prompt=instruction, batch_size=self.batch_size, show_progress_bar=progress, convert_to_numpy=True
        )
        return found
