"""What writes responses: transformers on a loaded LLM, or vLLM's offline engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.responses.generation import (
    GenerationSettings,
    Response,
    as_response,
    generate_responses,
    ids_that_end,
)
from llm2vec_gen_st.responses.retirement import written_until_end
from llm2vec_gen_st.text import TextTokenizer, message_prompt

BackendName = Literal["transformers", "vllm"]


class ResponseBackend(Protocol):
    """An LLM that responds to batches of queries."""

    name: str

    def writer(self) -> dict[str, Any]:
        """What tells this LLM from another, as it is recorded beside the responses."""
        ...

    def respond(self, queries: Sequence[str], settings: GenerationSettings, *, seed: int) -> list[Response]:
        """Respond to B queries.

        Args:
            queries: B queries.
            settings: Lengths and sampling.
            seed: Number of the batch; with the settings' seed it decides what is sampled.

        Returns:
            B responses, in order.
        """
        ...


class TransformersBackend:
    """Responses by ``transformers`` on a loaded LLM.

    Args:
        backbone: The LLM.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> backend = TransformersBackend(tiny_backbone())
        >>> [response.tokens for response in backend.respond(["Bees?"], GenerationSettings(max_new_tokens=3), seed=0)]
        [3]
    """

    name = "transformers"

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._plain = TextTokenizer(backbone.tokenizer)

    def writer(self) -> dict[str, Any]:
        """Reference to the base model, and its dtype."""
        return {
            **asdict(self._backbone.reference),
            "dtype": str(self._backbone.llm.dtype).removeprefix("torch."),
        }

    def respond(self, queries: Sequence[str], settings: GenerationSettings, *, seed: int) -> list[Response]:
        """See :meth:`ResponseBackend.respond`."""
        return generate_responses(self._backbone, self._plain, queries, settings, seed=seed)


class VllmBackend:
    """Responses by vLLM's offline engine, which batches the queries of a part continuously.

    It reports no non-finite scores, so no response is flagged ``non_finite``.

    Args:
        model: Hub id or directory of the LLM.
        revision: Hub revision.
        dtype: Number format of the weights, as vLLM names it.
        **engine: Further arguments of ``vllm.LLM``, such as ``max_model_len`` or ``tensor_parallel_size``.

    Raises:
        MissingExtraError: If vLLM is not installed.
    """

    name = "vllm"

    def __init__(self, model: str, *, revision: str | None = None, dtype: str = "auto", **engine: Any) -> None:
        self._vllm = require("vllm", extra="vllm", why="writing responses with vLLM")
        self._reference = {"id": model, "revision": revision, "dtype": dtype}
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, revision=revision)
        self._plain = TextTokenizer(self._tokenizer)
        self._ends = ids_that_end(_generation_config(model, revision), self._tokenizer)
        # Of the model's own generation config nothing is used that the settings do not record.
        self._engine = self._vllm.LLM(model=model, revision=revision, dtype=dtype, generation_config="vllm", **engine)

    def writer(self) -> dict[str, Any]:
        """Id, revision and dtype of the LLM."""
        return dict(self._reference)

    def respond(self, queries: Sequence[str], settings: GenerationSettings, *, seed: int) -> list[Response]:
        """See :meth:`ResponseBackend.respond`."""
        prompts = [
            message_prompt(self._tokenizer, self._plain, query, system=settings.system, limit=settings.max_query_tokens)
            for query in queries
        ]
        seeds = random.Random(f"{settings.seed}/{seed}")
        sampling = [
            self._vllm.SamplingParams(
                max_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p if settings.temperature > 0 else 1.0,
                seed=seeds.getrandbits(31),
                stop_token_ids=self._ends,
                detokenize=False,
            )
            for _ in prompts
        ]
        # As ids: as text, control tokens that a query spells would be read as control tokens.
        asked = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        found = self._engine.generate(asked, sampling, use_tqdm=False)
        written = (written_until_end([int(token) for token in row.outputs[0].token_ids], self._ends) for row in found)
        return [as_response(self._tokenizer, prompt, row) for prompt, row in zip(prompts, written, strict=True)]


def _generation_config(model: str, revision: str | None) -> GenerationConfig | None:
    try:
        found: GenerationConfig = GenerationConfig.from_pretrained(model, revision=revision or "main")
    except OSError:
        return None  # Not every model has such a file.
    return found


def as_backend(writer: str | Backbone | ResponseBackend, backend: BackendName) -> ResponseBackend:
    """The backend of a writer.

    Args:
        writer: Hub id or directory, a loaded LLM, or a backend, which is returned as it is.
        backend: Which backend loads a name.

    Raises:
        ValueError: If the backend is not known, or is not the one that a loaded LLM runs on.
    """
    if backend not in ("transformers", "vllm"):
        raise ValueError(f"The backend {backend!r} is not known; responses are written by 'transformers' or 'vllm'.")
    if isinstance(writer, str):
        return VllmBackend(writer) if backend == "vllm" else TransformersBackend(load_backbone(writer))
    if isinstance(writer, Backbone):
        if backend == "vllm":
            raise ValueError("vLLM loads the LLM itself: give its hub id or directory, not a loaded one.")
        return TransformersBackend(writer)
    return writer
