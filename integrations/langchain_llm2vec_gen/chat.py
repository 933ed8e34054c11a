"""A LangChain chat model on the very LLM that embeds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel, ModelProfile
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import Field, field_validator, model_validator
from transformers import PreTrainedModel
from typing_extensions import Self

from langchain_llm2vec_gen.answers import AnswerReader
from langchain_llm2vec_gen.embeddings import LLM2VecGenEmbeddings
from langchain_llm2vec_gen.writing import WritingSettings, next_tokens
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.reasoning import control_ids, written_text
from llm2vec_gen_st.responses.generation import end_of_text_ids
from llm2vec_gen_st.text import ChatPrompt, chat_prompt

_SETTINGS = ("max_tokens", "temperature", "top_p")
# LangChain's own way to ask for a stream leaves this among the options.
_IGNORED = ("stream",)


class PromptTooLongError(ContextOverflowError, ValueError):
    """The messages take more tokens than the LLM's context window has."""


@dataclass(frozen=True)
class _Piece:
    """A part of an answer: text, or (the last) why the answer ends and how many tokens were written."""

    text: str
    finish_reason: str | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0


class ChatLLM2VecGen(BaseChatModel):
    """Chat with the frozen LLM under an embedding model: its weights are in memory once.

    Messages go through the tokenizer's chat template with thinking turned off; blocks of reasoning that the LLM writes
    nevertheless are left out. Control tokens written inside a message stay text; spaces around a message are dropped.
    The student's LoRA layers take no part. Any number of threads may use one at once. ``max_tokens``, ``temperature``,
    ``top_p`` and ``stop`` may also be given to one call, or with ``bind``; a call's stop words replace the model's.

    Args:
        model: An :class:`~langchain_llm2vec_gen.LLM2VecGenEmbeddings`, or an :class:`~llm2vec_gen_st.LLM2VecGen`.
        max_tokens: Longest answer, in tokens. Near the end of the LLM's context window an answer may be shorter.
        temperature: 0 for the most likely answer, otherwise the sampling temperature.
        top_p: Nucleus sampling mass, used when ``temperature`` is above 0.
        stop: Texts that end an answer; they are not part of it.

    Raises:
        ValueError: If an option is out of its range, or ``model`` is something else (pydantic's ``ValidationError``).
            When called: if a message is not text, or its role is not known.
        PromptTooLongError: When called, if the messages leave no room in the context window; names both lengths.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> chat = ChatLLM2VecGen(tiny_model(), max_tokens=4)
        >>> chat.invoke("Where do polar bears live?").response_metadata["finish_reason"]
        'length'
    """

    model: LLM2VecGen = Field(exclude=True, repr=False)
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: list[str] | None = None

    def __init__(self, model: LLM2VecGen | LLM2VecGenEmbeddings, **options: Any) -> None:
        # As a mapping, for the host's signature names none of our fields.
        super().__init__(**{"model": model, **options})

    @field_validator("model", mode="before")
    @classmethod
    def _embedder(cls, value: Any) -> LLM2VecGen:
        found = value.model if isinstance(value, LLM2VecGenEmbeddings) else value
        if not isinstance(found, LLM2VecGen):
            raise ValueError(
                "ChatLLM2VecGen takes an LLM2VecGenEmbeddings or an LLM2VecGen, whose LLM it shares, not "
                f"{type(value).__name__}."
            )
        return found

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self._settings(None, {})
        if self.profile is None:
            self.profile = ModelProfile(text_inputs=True, image_inputs=False, tool_calling=False)
            if self.context_window is not None:
                self.profile["max_input_tokens"] = self.context_window
        return self

    @property
    def llm(self) -> PreTrainedModel:
        """The frozen causal LM; it is the one that embeds."""
        return self.model.llm

    @property
    def model_name(self) -> str:
        """Id of the base model."""
        return self.model.backbone.reference.id

    @property
    def context_window(self) -> int | None:
        """Most tokens of prompt and answer together; ``None`` if the LLM names no limit."""
        found = getattr(self.llm.config.get_text_config(), "max_position_embeddings", None)
        return None if found is None else int(found)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, read as nothing but text."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.model.suffix_transformer.text_tokenizer.ids(text, add_special_tokens=False).ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Number of tokens of a prompt, control tokens of the chat template included.

        Args:
            messages: The messages.
            tools: Must be empty or ``None``; this chat model calls no tools.

        Returns:
            The number that the LLM would read before it answers.

        Raises:
            ValueError: If a message is not text, or there are tools.
        """
        if tools:
            raise ValueError("ChatLLM2VecGen calls no tools, so their descriptions are part of no prompt.")
        return len(self._prompt(messages).ids)

    @property
    def _llm_type(self) -> str:
        return "llm2vec-gen"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {
            "model_name": self.model_name,
            "base_fingerprint": self.model.backbone.reference.fingerprint,
            **{name: getattr(self, name) for name in _SETTINGS},
            # Not "stop": under that name LangChain's caches know the stop words of a call, which would hide these.
            "model_stop": self.stop,
        }

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Token by token, so that writing ends when the call is cancelled.
        return await agenerate_from_stream(self._astream(messages, stop, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for piece in self._pieces(messages, self._settings(stop, kwargs)):
            chunk = self._chunk(piece)
            if run_manager is not None:
                run_manager.on_llm_new_token(piece.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        # The host takes each chunk in a thread; the run manager is told here, where it is at home.
        async for chunk in super()._astream(messages, stop, **kwargs):
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _chunk(self, piece: _Piece) -> ChatGenerationChunk:
        if piece.finish_reason is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=piece.text))
        usage: Any = {
            "input_tokens": piece.prompt_tokens,
            "output_tokens": piece.answer_tokens,
            "total_tokens": piece.prompt_tokens + piece.answer_tokens,
        }
        metadata = {"finish_reason": piece.finish_reason, "model_name": self.model_name}
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content=piece.text, usage_metadata=usage, response_metadata=metadata, chunk_position="last"
            ),
            generation_info=metadata,
        )

    def _settings(self, stop: Sequence[str] | str | None, options: Mapping[str, Any]) -> WritingSettings:
        """The model's settings, or a call's own."""
        unknown = sorted(set(options) - {*_SETTINGS, *_IGNORED})
        if unknown:
            raise ValueError(
                f"ChatLLM2VecGen does not know the options {', '.join(unknown)}; a call takes {', '.join(_SETTINGS)} "
                "and stop."
            )
        chosen = {name: getattr(self, name) if options.get(name) is None else options[name] for name in _SETTINGS}
        words = (self.stop if stop is None else stop) or ()
        return WritingSettings(**chosen, stop=(words,) if isinstance(words, str) else tuple(words))

    def _prompt(self, messages: Sequence[BaseMessage]) -> ChatPrompt:
        if not messages:
            raise ValueError("There are no messages to answer.")
        turns = [(_role(place, message), _text(place, message)) for place, message in enumerate(messages)]
        return chat_prompt(self.model.backbone.tokenizer, self.model.suffix_transformer.text_tokenizer, turns)

    def _pieces(self, messages: Sequence[BaseMessage], settings: WritingSettings) -> Iterator[_Piece]:
        """The answer's text, piece by piece, then its end."""
        prompt, limit = self._prompt(messages), settings.max_tokens
        reader = AnswerReader(settings.stop, reasoning=prompt.opens_reasoning)
        if self.context_window is not None:
            if len(prompt.ids) >= self.context_window:
                raise PromptTooLongError(
                    f"The prompt takes {len(prompt.ids)} tokens, and the context window of {self.model_name} has "
                    f"{self.context_window}, answer included. Shorten the messages, or leave out the oldest."
                )
            limit = min(limit, self.context_window - len(prompt.ids))
        backbone, written, ended = self.model.backbone, list[int](), False
        ends = set(end_of_text_ids(backbone))
        control = control_ids(backbone.tokenizer) | ends

        def text() -> str:
            return written_text(backbone.tokenizer, written, control)

        for token in next_tokens(self.llm, prompt.ids, settings):
            written.append(token)
            ended = token in ends
            # A character may take several tokens; up to the last of them it is decoded as U+FFFD.
            if piece := reader.read(text().rstrip("\ufffd")):
                yield _Piece(piece)
            if ended or reader.stopped or len(written) == limit:
                break
        rest = reader.read(text(), complete=True)
        reason = "stop" if ended or reader.stopped else "length"
        yield _Piece(rest, reason, prompt_tokens=len(prompt.ids), answer_tokens=len(written))


def _role(place: int, message: BaseMessage) -> str:
    """A message's role as chat templates know it."""
    if isinstance(message, AIMessage) and message.tool_calls:
        raise ValueError(f"Message {place} calls tools, which ChatLLM2VecGen does not know.")
    kinds: dict[type[BaseMessage], str] = {HumanMessage: "user", AIMessage: "assistant", SystemMessage: "system"}
    role = next((role for kind, role in kinds.items() if isinstance(message, kind)), None)
    if role is None and isinstance(message, ChatMessage):
        role = message.role
    if role is None:
        raise ValueError(
            f"Message {place} is of the type {message.type!r}; ChatLLM2VecGen takes system, human and AI messages, and "
            "chat messages with a role that the tokenizer's chat template knows."
        )
    return role


def _text(place: int, message: BaseMessage) -> str:
    """A message's text."""
    blocks = [message.content] if isinstance(message.content, str) else message.content
    for block in blocks:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind != "text":
            raise ValueError(
                f"Message {place} has a content block of the type {kind!r}; ChatLLM2VecGen reads text only."
            )
    return "".join(block if isinstance(block, str) else str(block["text"]) for block in blocks)
