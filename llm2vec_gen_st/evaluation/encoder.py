"""A SentenceTransformer as mteb calls it: each side of a task with exactly the instruction that is on record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.types import PromptType

from llm2vec_gen_st.evaluation.instructions import Side

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from sentence_transformers import SentenceTransformer
    from torch.utils.data import DataLoader


class InstructedEncoder(AbsEncoder):
    """Encodes the texts of one task.

    mteb's own wrapper leaves out prompts of tasks that are not mteb's, such as one's own, and falls back on prompts of
    the model where none is given; here nothing is left out and nothing falls back.

    Args:
        model: The model.
        instructions: Side of the task to the instruction put before its texts.
    """

    mteb_model_meta: ModelMeta

    def __init__(self, model: SentenceTransformer, instructions: Mapping[str, str]) -> None:
        self.model = model
        self.instructions = dict(instructions)
        self.mteb_model_meta = ModelMeta.create_empty()
        self.texts = 0
        """How many texts have been encoded."""

    def encode(
        self,
        inputs: DataLoader[Any],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Embed the N texts of a data loader as (N, D).

        Raises:
            KeyError: If the texts are of a side that has no instruction on record.
        """
        side: Side = "text" if prompt_type is None else prompt_type.value
        instruction = self.instructions[side]
        encode = {"text": self.model.encode, "query": self.model.encode_query, "document": self.model.encode_document}
        texts = [text for batch in inputs for text in batch["text"]]
        self.texts += len(texts)
        found = encode[side](texts, prompt=instruction, **kwargs)
        return found.detach().float().cpu() if isinstance(found, torch.Tensor) else found
