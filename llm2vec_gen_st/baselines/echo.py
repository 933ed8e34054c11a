"""Echo embeddings (Springer et al. 2024): the text twice, so that the tokens pooled have seen all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.llm_module import Layout, LLMModule, encoder_of

BEFORE = "Rewrite the following text:\n"
BETWEEN = "\nThe rewritten text:\n"


class EchoLLM(LLMModule):
    """``instruction ⊕ before ⊕ text ⊕ between ⊕ text`` in one causal pass, pooled over the second text.

    The parts are tokenized apart, so both occurrences are the same tokens whatever stands around them, and a long text
    is cut in both.

    Args:
        backbone: The LLM.
        before: What stands before the first occurrence.
        between: What stands between the two.
        **options: As in :class:`~llm2vec_gen_st.baselines.llm_module.LLMModule`.
    """

    setting_kinds: ClassVar = {**LLMModule.setting_kinds, "before": "text", "between": "text"}

    def __init__(self, backbone: Backbone, *, before: str = BEFORE, between: str = BETWEEN, **options: Any) -> None:
        super().__init__(backbone, **options)
        self.before = before
        self.between = between

    def layout(self, text: str, prompt: str) -> Layout:
        """Both occurrences; the second is pooled.

        Raises:
            ValueError: If instruction and template leave no room for the text.
        """
        head, _ = self.text_ids(prompt + self.before, self.max_seq_length, special=True)
        middle, _ = self.text_ids(self.between, self.max_seq_length)
        room = (self.max_seq_length - len(head) - len(middle)) // 2
        if room < 1:
            raise ValueError(
                f"max_seq_length {self.max_seq_length} leaves no room for a text twice beside an instruction and "
                f"template of {len(head) + len(middle)} tokens; raise it or shorten the instruction."
            )
        again, cut = self.text_ids(text, room)
        ids = self.some_ids([*head, *again, *middle, *again])
        return Layout(ids, len(ids) - max(1, len(again)), len(ids), cut)


def echo(
    base: str | Backbone,
    *,
    max_seq_length: int = 1024,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> SentenceTransformer:
    """Echo embeddings of a plain LLM (Springer et al. 2024), zero-shot.

    Args:
        base: Hub id, directory, or loaded backbone.
        max_seq_length: Longest input in tokens; it holds the text twice.
        prompts: Instructions by name; an instruction stands once, in front.
        device: Device to run on.
        model_kwargs: Passed on when the base model is loaded.

    Returns:
        The encoder; its embeddings have the LLM's width H.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> echo(tiny_backbone(), device="cpu").encode(["bees"]).shape
        (1, 64)
    """
    return encoder_of(
        EchoLLM, base, max_seq_length=max_seq_length, prompts=prompts, device=device, model_kwargs=model_kwargs
    )
