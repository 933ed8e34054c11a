"""What training of the baselines shares: the host's trainer on LoRA weights, resumable, without pickled models."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from llm2vec_gen_st.baselines.llm_module import LORA_FILE, LLMModule
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_json

if TYPE_CHECKING:
    from datasets import Dataset

CHECKPOINTS = "checkpoints"
SETTINGS_FILE = "settings.json"
LOG_FILE = "log.json"
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraSettings:
    """The LoRA layers that are trained.

    Args:
        r: Rank.
        lora_alpha: Scaling is ``lora_alpha / r``.
        target_modules: Names of the layers they act on.
    """

    r: int = 16
    lora_alpha: float = 32.0
    target_modules: Sequence[str] = LINEAR_LAYERS

    def as_config(self) -> dict[str, Any]:
        """As a module's ``lora`` argument."""
        return {"r": self.r, "lora_alpha": self.lora_alpha, "target_modules": list(self.target_modules)}


@dataclass(frozen=True)
class StageSettings:
    """One run of the trainer: AdamW without weight decay, linear schedule.

    Args:
        steps: Optimizer steps.
        batch_size: Rows a step.
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear warm-up.
        max_seq_length: Longest row in tokens, in training.
        seed: Seed of order and noise.
        save_steps: Steps between checkpoints.
        logging_steps: Steps between log entries.
    """

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 5e-5
    warmup_steps: int = 0
    max_seq_length: int = 512
    seed: int = 42
    save_steps: int = 200
    logging_steps: int = 10


class LoraTrainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer for modules that train LoRA layers on a frozen LLM.

    Checkpoints hold no base model, and resuming reads LoRA matrices into the model in memory; the host would load a
    whole second LLM.
    """

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Config and LoRA matrices only; the host would add the tokenizer and a pickle of its arguments."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        self.model.save_pretrained(folder, create_model_card=False)

    def _load_from_checkpoint(self, checkpoint_path: str, *args: Any) -> None:
        model = cast(Any, self.accelerator.unwrap_model(self.model))
        module_of(model).load_weights(Path(checkpoint_path) / LORA_FILE)

    def restore(self, checkpoint: Path) -> None:
        """Become what a checkpoint holds, weights and log, without training on."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))


def fit(
    model: SentenceTransformer,
    rows: Dataset,
    loss: nn.Module,
    stage: StageSettings,
    folder: Path,
    *,
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Train what requires gradients; the same call again goes on where a stopped one was.

    Args:
        model: The encoder, of one module.
        rows: The dataset; each column is read by the module's ``preprocess``, unless there is a collator.
        loss: The loss.
        stage: The settings.
        folder: Where checkpoints and log go.
        collator: Makes a batch of rows.
        progress: Whether a progress bar is shown.

    Returns:
        The log: ``step`` and ``loss`` of each entry.

    Raises:
        ValueError: If there are fewer rows than a batch holds.
    """
    require("accelerate", extra="train", why="training")
    if len(rows) < stage.batch_size:
        raise ValueError(f"{len(rows)} rows are not enough for a batch of {stage.batch_size}.")
    module = module_of(model)
    kept_length = module.max_seq_length
    module.max_seq_length = stage.max_seq_length
    try:
        trainer = LoraTrainer(
            model=model,
            args=_arguments(stage, folder / CHECKPOINTS, progress),
            train_dataset=rows,
            loss=loss,
            data_collator=cast(Any, collator),
        )
        checkpoint = _last_checkpoint(folder / CHECKPOINTS)
        if checkpoint is not None and _step(checkpoint) >= stage.steps:
            # The host would take one more step than asked for.
            trainer.restore(checkpoint)
        else:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        module.max_seq_length = kept_length
    model.eval()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    write_json(folder / LOG_FILE, log)
    return log


def finish(model: SentenceTransformer, output: Path, *stages: Path) -> None:
    """Save a trained model, then drop its checkpoints; the host's model card would quote training texts."""
    model.save_pretrained(str(output), create_model_card=False)
    for stage in stages:
        shutil.rmtree(stage / CHECKPOINTS, ignore_errors=True)


def module_of(model: SentenceTransformer) -> LLMModule:
    """The LLM module of a pipeline."""
    module = model[0]
    assert isinstance(module, LLMModule)
    return module


def claim(folder: Path, wanted: dict[str, Any]) -> None:
    """Record what a run is, and refuse a folder that holds another one.

    Args:
        folder: The run's folder.
        wanted: Everything that its result depends on.

    Raises:
        ValueError: If the folder holds another run; names what differs.
    """
    path = folder / SETTINGS_FILE
    wanted = json.loads(json.dumps(wanted))
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = sorted(key for key in wanted.keys() | found.keys() if found.get(key) != wanted.get(key))
        if differing:
            raise ValueError(
                f"{folder} holds another training run (different: {', '.join(differing)}). Repeat its call to go on "
                "with it, or choose another output folder."
            )
    write_json(path, wanted)


def settings_of(value: Any) -> dict[str, Any]:
    """A settings object as JSON values."""
    return dict(json.loads(json.dumps(asdict(value))))


def rows_digest(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> str:
    """Digest of the rows' columns, by which a run is recognised."""
    values = [[row[name] for name in columns] for row in rows]
    return hashlib.sha256(json.dumps(values).encode("utf-8", "backslashreplace")).hexdigest()


def _arguments(stage: StageSettings, folder: Path, progress: bool) -> SentenceTransformerTrainingArguments:
    return SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=stage.batch_size,
        learning_rate=stage.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=stage.warmup_steps,
        # LoRA matrices that are kept as they are would shrink.
        weight_decay=0.0,
        max_steps=stage.steps,
        save_steps=stage.save_steps,
        save_total_limit=2,
        logging_steps=stage.logging_steps,
        seed=stage.seed,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        disable_tqdm=not progress,
        report_to="none",
    )


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the host writes its state last."""
    found = [path for path in folder.glob("checkpoint-*") if (path / TRAINER_STATE_NAME).exists()]
    return max(found, key=_step, default=None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
