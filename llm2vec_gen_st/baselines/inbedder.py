"""InBedder (Peng et al. 2024): the instruction as a question, the state of the answer's first position."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.llm_module import Layout, LLMModule
from llm2vec_gen_st.baselines.loading import encoder_of_base_or_saved

QUESTION = "What is this text about?"

# The published InBedder models were trained on exactly this.
_BEFORE, _BETWEEN, _AFTER = "### Input:\n", "\n\n### Instruction:\n", "\n\n### Response:"


class InBedderLLM(LLMModule):
    """``text ⊕ question ⊕ "Response:"`` in one causal pass; the state from which the first answer token is generated.

    The text stands first, and only the text is cut. The host's prompt is the question.

    Args:
        backbone: The LLM.
        question: The question where no instruction is given.
        **options: As in :class:`~llm2vec_gen_st.baselines.llm_module.LLMModule`.
    """

    setting_kinds: ClassVar = {**LLMModule.setting_kinds, "question": "text"}

    def __init__(self, backbone: Backbone, *, question: str = QUESTION, **options: Any) -> None:
        super().__init__(backbone, **options)
        self.question = question

    def layout(self, text: str, prompt: str) -> Layout:
        """Text, question and the start of the answer; the last position is pooled."""
        ids, cut = self.prompt_ids(text, prompt.strip() or self.question, self.max_seq_length)
        return Layout(ids, len(ids) - 1, len(ids), cut)

    def prompt_ids(self, text: str, question: str, limit: int) -> tuple[list[int], bool]:
        """Token ids up to where the answer starts, and whether the text was cut.

        Raises:
            ValueError: If the question leaves no room for any text.
        """
        head, _ = self.text_ids(_BEFORE, limit, special=True)
        tail, _ = self.text_ids(_BETWEEN + question + _AFTER, limit)
        room = limit - len(head) - len(tail)
        if room < 1:
            raise ValueError(
                f"max_seq_length {limit} leaves no room for text beside a question and template of "
                f"{len(head) + len(tail)} tokens; raise it or shorten the instruction."
            )
        body, cut = self.text_ids(text, room)
        return [*head, *body, *tail], cut

    def answered(self, text: str, question: str, answer: str, max_answer_tokens: int) -> Layout:
        """A training row: what :meth:`layout` reads, then the answer and its end; the answer is what is "pooled".

        Args:
            text: The text.
            question: The question about it.
            answer: The answer.
            max_answer_tokens: Longest answer; a longer one loses its end.
        """
        start, cut = self.prompt_ids(text, question.strip() or self.question, self.max_seq_length)
        found, _ = self.text_ids(answer, max_answer_tokens)
        end = self.tokenizer.eos_token_id
        found = found if end is None else [*found, int(end)][:max_answer_tokens]
        return Layout([*start, *found], len(start), len(start) + len(found), cut)


def inbedder(
    base_or_path: str | Path | Backbone,
    *,
    base: str | Backbone | None = None,
    question: str = QUESTION,
    max_seq_length: int = 512,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """InBedder on a base LLM (not trained), on a published InBedder LLM, or trained here.

    Args:
        base_or_path: A backbone; hub id or directory of an LLM, such as one that the authors published; or a directory
            that :func:`~llm2vec_gen_st.baselines.train_inbedder` wrote.
        base: For such a directory, another place of its base model, or a loaded backbone.
        question: The question where no instruction is given.
        max_seq_length: Longest input in tokens.
        prompts: Instructions by name; each is put behind the text, as a question about it.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.

    Returns:
        The encoder; its embeddings have the LLM's width H.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> inbedder(tiny_backbone(), device="cpu").encode(["bees"], prompt="Which animal?").shape
        (1, 64)
    """
    return encoder_of_base_or_saved(
        InBedderLLM,
        base_or_path,
        base=base,
        question=question,
        max_seq_length=max_seq_length,
        prompts=prompts,
        device=device,
        model_kwargs=model_kwargs,
    )
