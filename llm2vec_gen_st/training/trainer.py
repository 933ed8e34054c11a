"""The host's trainer, with the three things it cannot know about a student."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.frozen_llm import LORA_FILE
from llm2vec_gen_st.modules.response_head import WEIGHTS_FILE
from llm2vec_gen_st.modules.suffix_transformer import SUFFIX_FILE


class StudentTrainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer for students.

    It resumes into the model in memory instead of building a second LLM, writes checkpoints without the base model,
    and divides losses by the tokens, rows and hard negatives of the whole accumulated, distributed batch, so that
    accumulation and more processes change nothing (in-batch negatives are those of one batch in all processes).
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

    def restore(self, checkpoint: Path) -> None:
        """Become what a checkpoint holds, weights and log, without training on.

        Args:
            checkpoint: A folder that this trainer wrote.
        """
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Suffix and heads only; the host would add the tokenizer and a pickle of its arguments."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        self.model.save_pretrained(folder, create_model_card=False)

    def _load_from_checkpoint(self, checkpoint_path: str, *args: Any) -> None:
        """Read suffix and heads into the model that is there; the host would load a whole second LLM."""
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, LLM2VecGen)
        folder = Path(checkpoint_path)
        lora = folder / LORA_FILE
        model.suffix_transformer.load_weights(folder / SUFFIX_FILE, lora if lora.exists() else None)
        head = next(child for child in folder.iterdir() if child.name.endswith("_ResponseHead"))
        model.response_head.load_weights(head / WEIGHTS_FILE)
