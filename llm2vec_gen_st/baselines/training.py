"""What training of the baselines shares: the host's trainer on LoRA weights, resumable, without pickled models."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from torch import nn

from llm2vec_gen_st.backbone import Backbone, embedding_weight
from llm2vec_gen_st.baselines.llm_module import LLMModule, encoder_of
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.host_checkpoints import ResumableTrainer, last_checkpoint
from llm2vec_gen_st.manifests import claim
from llm2vec_gen_st.modules.attention import quick_backward
from llm2vec_gen_st.modules.frozen_llm import LORA_FILE
from llm2vec_gen_st.modules.lora import lora_removed_on_failure
from llm2vec_gen_st.modules.truncation import warn_once_if_cut

if TYPE_CHECKING:
    from datasets import Dataset

Module = TypeVar("Module", bound=LLMModule)

RUN_FOLDER = "training"
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
        gradient_checkpointing: Run the LLM's layers again in backward instead of keeping their activations: the same
            result for less memory and more time; may differ from call to call of one run.
    """

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 5e-5
    warmup_steps: int = 0
    max_seq_length: int = 512
    seed: int = 42
    save_steps: int = 200
    logging_steps: int = 10
    gradient_checkpointing: bool = False


class LoraTrainer(ResumableTrainer):
    """The trainer of modules that train LoRA layers on a frozen LLM."""

    def load_trained(self, checkpoint: Path) -> None:
        """Read LoRA matrices into the model that is there."""
        model = cast(Any, self.accelerator.unwrap_model(self.model))
        module_of(model).load_lora_file(checkpoint / LORA_FILE)


@contextmanager
def training_run(
    output: Path,
    kind: type[Module],
    backbone: Backbone,
    lora: LoraSettings,
    *,
    seed: int,
    depends_on: Mapping[str, Any],
    prompts: Mapping[str, str] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[SentenceTransformer, Module]]:
    """An encoder with new LoRA layers, to train in a block; behind the block it is saved and its checkpoints dropped.

    Should the block fail, the LoRA layers are taken out of the LLM again.

    Args:
        output: Where the encoder goes; ``training/`` inside it holds what the run is.
        kind: The class of its one module.
        backbone: The LLM, without LoRA layers.
        lora: The LoRA layers.
        seed: Seed of their start.
        depends_on: Everything else that the result depends on, apart from the LLM.
        prompts: Instructions by name, saved with the encoder.
        model_kwargs: What the LLM was loaded with.
        **settings: The module's.

    Yields:
        The encoder and its module.

    Raises:
        ValueError: If the folder holds another run.
    """
    told = {"base": asdict(backbone.reference), "lora": settings_of(lora), **depends_on}
    claim(output / RUN_FOLDER / SETTINGS_FILE, told, holds="a training run")
    with lora_removed_on_failure(backbone.llm):
        # The host's seed is set only once its trainer is made; the LoRA start must be the same in every call.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = encoder_of(
                kind, backbone, lora=lora.as_config(), prompts=prompts, model_kwargs=model_kwargs, **settings
            )
        module = model[0]
        assert isinstance(module, kind)
        yield model, module
    # The host's model card would quote training texts.
    model.save_pretrained(str(output), create_model_card=False)
    for checkpoints in list((output / RUN_FOLDER).rglob(CHECKPOINTS)):
        shutil.rmtree(checkpoints, ignore_errors=True)


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
    if len(rows) < stage.batch_size:
        raise ValueError(f"{len(rows)} rows are not enough for a batch of {stage.batch_size}.")
    module = module_of(model)
    kept_length = module.max_seq_length
    module.max_seq_length = stage.max_seq_length
    try:
        recomputing = module.recomputing() if stage.gradient_checkpointing else nullcontext()
        cut = warn_once_if_cut(stage.max_seq_length, "the stage's max_seq_length")
        with recomputing, cut, quick_backward(embedding_weight(module.llm)):
            trainer = LoraTrainer(
                model=model,
                args=_arguments(stage, folder / CHECKPOINTS, progress),
                train_dataset=rows,
                loss=loss,
                data_collator=cast(Any, collator),
            )
            trainer.run_to(stage.steps, last_checkpoint(folder / CHECKPOINTS))
    finally:
        module.max_seq_length = kept_length
    model.eval()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    write_json(folder / LOG_FILE, log)
    return log


def module_of(model: SentenceTransformer) -> LLMModule:
    """The LLM module of a pipeline."""
    module = model[0]
    assert isinstance(module, LLMModule)
    return module


def settings_of(value: LoraSettings | StageSettings) -> dict[str, Any]:
    """Those of the settings that a result depends on, as JSON values."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    found.pop("gradient_checkpointing", None)
    return found


def require_trainer() -> None:
    """Refuse to train where its libraries are missing, before anything is loaded.

    Raises:
        MissingExtraError: If one is missing; names the extra.
    """
    for library in ("datasets", "accelerate"):
        require(library, extra="train", why="training")


def check_rows(rows: Sequence[Mapping[str, str]], columns: Sequence[str], *, filled: Sequence[str] = ()) -> None:
    """Refuse rows that lack something to train on.

    Args:
        rows: The rows.
        columns: Fields that must hold texts.
        filled: Those whose texts must not be blank.

    Raises:
        ValueError: If a row lacks a field; names both.
    """
    for number, row in enumerate(rows):
        absent = [name for name in columns if not isinstance(row.get(name), str)]
        absent = absent or [name for name in filled if not row[name].strip()]
        if absent:
            raise ValueError(f"Row {number} needs texts for {', '.join(absent)}, found {dict(row)!r:.200}.")


def dataset_of(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> Dataset:
    """The rows' columns as the host's trainer takes them."""
    datasets = require("datasets", extra="train", why="training")
    dataset: Dataset = datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in columns})
    return dataset


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
        logging_steps=stage.logging_steps,
        seed=stage.seed,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        disable_tqdm=not progress,
        report_to="none",
    )
