"""The host's trainer, with what it cannot know about a student."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llm2vec_gen_st.host_checkpoints import ResumableTrainer
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.frozen_llm import LORA_FILE
from llm2vec_gen_st.modules.response_head import WEIGHTS_FILE
from llm2vec_gen_st.modules.suffix_transformer import SUFFIX_FILE


class StudentTrainer(ResumableTrainer):
    """SentenceTransformerTrainer for students.

    Beside what every :class:`~llm2vec_gen_st.host_checkpoints.ResumableTrainer` does, it divides losses
    by the tokens, rows and hard negatives of the whole accumulated, distributed batch, so that accumulation and more
    processes change nothing (in-batch negatives are those of one batch in all processes).
    """

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Collect the batches of one step and tell each what to divide by.

        Args:
            epoch_iterator: Where batches come from.
            num_batches: Batches a step.
            device: Where counts are gathered.

        Returns:
            The batches, and the host's own count (not used by our loss).
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, items
        negatives = sum(len(batch.get("query_negative_of", ())) for batch in batches)
        rows = sum(len(batch["query_input_ids"]) for batch in batches) - negatives
        tokens = sum(int(batch["response_attention_mask"].sum()) for batch in batches if "response_input_ids" in batch)
        counted = torch.tensor([[float(rows), float(tokens), float(negatives)]], device=device)
        counts = self.accelerator.gather(counted).sum(dim=0)
        mean_rows, mean_tokens, mean_negatives = (counts / (len(batches) * self.accelerator.num_processes)).tolist()
        for batch in batches:
            batch["query_mean_rows"] = torch.tensor(mean_rows)
            if "query_negative_of" in batch:
                batch["query_mean_negatives"] = torch.tensor(mean_negatives)
            if "response_input_ids" in batch:
                batch["response_mean_tokens"] = torch.tensor(mean_tokens)
        return batches, items

    def load_trained(self, checkpoint: Path) -> None:
        """Read suffix, heads and LoRA matrices into the model that is there."""
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, LLM2VecGen)
        lora = checkpoint / LORA_FILE
        model.suffix_transformer.load_weights(checkpoint / SUFFIX_FILE, lora if lora.exists() else None)
        head = next(child for child in checkpoint.iterdir() if child.name.endswith("_ResponseHead"))
        model.response_head.load_weights(head / WEIGHTS_FILE)
