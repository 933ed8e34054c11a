"""train(): from queries and responses to a saved student, resumable, on the host's trainer."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.host_checkpoints import last_checkpoint, steps_done
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.lora import lora_removed_on_failure
from llm2vec_gen_st.training.collator import StudentCollator
from llm2vec_gen_st.training.data import LABEL, NEGATIVES, load_rows, split_held_out, student_rows
from llm2vec_gen_st.training.evaluation import ResponseRetrievalEvaluator
from llm2vec_gen_st.training.recipes import Recipe, resolve
from llm2vec_gen_st.training.record import RUN_FOLDER, claim
from llm2vec_gen_st.training.report import write_log
from llm2vec_gen_st.training.stages import RECONSTRUCTION, WHOLE, select_trainable, stages
from llm2vec_gen_st.training.teaching import Targets, with_targets
from llm2vec_gen_st.training.trainer import StudentTrainer
from llm2vec_gen_st.training.warm_start import reconstruction_only, ridge_alignment, ridge_heads, suffix_from_text

if TYPE_CHECKING:
    from datasets import Dataset

CHECKPOINTS = "checkpoints"


def train(
    data: str | Path | Dataset,
    output_dir: str | Path,
    *,
    base: str | Backbone | None = None,
    teacher: str | SentenceTransformer | None = None,
    recipe: str | Path | Recipe | None = None,
    start: str | Path | None = None,
    label_cache: str | Path | None = None,
    partial: bool = False,
    progress: bool = True,
    report_to: str = "none",
    **overrides: Any,
) -> LLM2VecGen:
    """Train a student and save it; the same call again goes on where a stopped one was (paper, section 3).

    Args:
        data: A folder of responses, a ``.jsonl`` or ``.parquet`` file, or a dataset with the columns ``query`` and
            ``response`` (and ``label``, the teacher's vectors, if there is no teacher); see
            :func:`~llm2vec_gen_st.training.data.load_rows` for hard negatives.
        output_dir: Where the student goes; ``training/`` inside it holds recipe, log, loss plot and, until the run has
            ended, the checkpoints.
        base: The frozen LLM: hub id, directory, or loaded backbone; the recipe's if not given.
        teacher: ``"self"``, a SentenceTransformer (loaded, name or directory), or a published LLM2Vec adapter; the
            recipe's if not given; not used with a ``label`` column.
        recipe: Name in :data:`~llm2vec_gen_st.training.RECIPES`, a JSON file
            (:func:`~llm2vec_gen_st.training.recipes.load_recipe`) or a recipe; chosen by the base if not given, and
            that of the built-in model if that is not given either.
        start: A saved student to go on from, instead of an untrained one; with ``epochs=0`` only the recipe's
            ``recon_steps`` are run.
        label_cache: SQLite file of teacher embeddings; ``training/labels.sqlite`` if not given.
        partial: Whether a folder whose responses are not all written yet is accepted.
        progress: Whether progress bars are shown.
        report_to: The host's experiment trackers.
        **overrides: Fields of the recipe to replace.

    Returns:
        The trained student.

    Raises:
        ValueError: If columns are missing or unknown (before the base is loaded), nothing would be trained, or the
            folder holds another run.
    """
    chosen = resolve(
        recipe,
        base=base.reference.id if isinstance(base, Backbone) else base,
        teacher=teacher if isinstance(teacher, str) else None,
        overrides=overrides,
    )
    assert chosen.base is not None
    taught_by = chosen.teacher if teacher is None or isinstance(teacher, str) else teacher
    rows = load_rows(data, chosen, partial=partial)
    if chosen.align_weight and taught_by is None and LABEL not in rows.column_names:
        raise ValueError(
            "The alignment loss needs a teacher, or a column 'label' with its vectors; or set align_weight=0."
        )
    require("accelerate", extra="train", why="training")
    output = Path(output_dir)
    run = output / RUN_FOLDER
    called = taught_by if isinstance(taught_by, str) or taught_by is None else type(taught_by).__name__
    claim(run, chosen, called, rows, start)

    backbone = base if isinstance(base, Backbone) else load_backbone(chosen.base, model_kwargs={"dtype": chosen.dtype})
    fit, held = split_held_out(rows, chosen)
    dataset = student_rows(fit, chosen)
    targets: Targets | None = None
    if chosen.align_weight:
        cache = label_cache or run / "labels.sqlite"
        targets = with_targets(dataset, held, chosen, taught_by, backbone, cache=cache, progress=progress)
        dataset = targets.rows
    labels = None if targets is None else targets.labels
    # A backbone that the caller gave is the caller's again if anything fails.
    with lora_removed_on_failure(backbone.llm):
        model = _student(backbone, chosen, labels, start)
        history = _run_stages(
            model, chosen, dataset, labels, run, fresh=start is None, progress=progress, report_to=report_to
        )
    if int(os.environ.get("RANK", "0")) == 0:
        if targets is not None and targets.held_out is not None:
            history.append({"step": history[-1]["step"], **held_out_scores(model, held, targets.held_out, chosen)})
        write_log(run, history)
        model.save_pretrained(str(output))
        shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
    return model


def _student(backbone: Backbone, recipe: Recipe, labels: np.ndarray | None, start: str | Path | None) -> LLM2VecGen:
    """The student to train: a saved one, or an untrained one."""
    if start is None:
        return LLM2VecGen.from_base(
            backbone,
            thought_tokens=recipe.thought_tokens,
            compression_tokens=recipe.compression_tokens,
            embedding_dim=backbone.hidden_size if labels is None else labels.shape[1],
            max_seq_length=recipe.max_seq_length,
            seed=recipe.seed,
            lora=recipe.lora,
        )
    model = LLM2VecGen(str(start), backbone=backbone)
    rank = (model.suffix_transformer.lora or {"r": 0})["r"]
    if rank != recipe.lora_rank:
        raise ValueError(
            f"The student {start} has LoRA layers of rank {rank} (0 for none), but the recipe's lora_rank is "
            f"{recipe.lora_rank}; set it to {rank}."
        )
    return model


def _run_stages(
    model: LLM2VecGen,
    recipe: Recipe,
    dataset: Dataset,
    labels: np.ndarray | None,
    run: Path,
    *,
    fresh: bool,
    progress: bool,
    report_to: str,
) -> list[dict[str, Any]]:
    """Run every stage to its end, from where a stopped run was; returns the log."""
    parts = stages(recipe, len(dataset))
    started = any(last_checkpoint(run / CHECKPOINTS / name) is not None for name, _ in parts)
    if not started and fresh and recipe.init == "ridge":
        if labels is None:
            raise ValueError("A ridge start fits the teacher's embeddings; without alignment use init='random'.")
        suffix_from_text(model, recipe.suffix_text)
        fitted = ridge_heads(model, *_ridge_rows(dataset, labels, recipe), seed=recipe.seed, progress=progress)
        write_json(run / "ridge_start.json", asdict(fitted))
        print(f"Ridge start: held-out distance {fitted.held_out_loss:.3f} of the mean embedding's.", flush=True)
    _announce(model)

    if recipe.gradient_checkpointing:
        # Renamed in newer versions of transformers, which warn of the older name.
        enable = getattr(model.llm, "activation_checkpointing_enable", None) or model.llm.gradient_checkpointing_enable
        enable()
    history: list[dict[str, Any]] = []
    for name, stage in parts:
        select_trainable(model, name, recipe)
        context = cast(AbstractContextManager[None], nullcontext())
        if name == RECONSTRUCTION:
            context = reconstruction_only(model, dataset["query"][: recipe.ridge_rows], progress=progress)
        with context:
            trainer = _trainer(model, dataset, stage, run / CHECKPOINTS / name, progress, report_to)
            checkpoint = last_checkpoint(run / CHECKPOINTS / name)
            if checkpoint is not None and steps_done(checkpoint) >= stage.max_steps:
                # The host would take one more step than asked for.
                trainer.restore(checkpoint)
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
        done = history[-1]["step"] if history else 0
        history += [{**row, "step": row["step"] + done} for row in trainer.state.log_history]
        if name == WHOLE and recipe.ridge_refit and labels is not None:
            end = ridge_alignment(model, *_ridge_rows(dataset, labels, recipe), seed=recipe.seed, progress=progress)
            write_json(run / "ridge_end.json", asdict(end))
            print(f"Ridge refit: held-out distance {end.held_out_loss:.3f} of the mean embedding's.", flush=True)
    return history


def held_out_scores(model: LLM2VecGen, held: Dataset, labels: np.ndarray, recipe: Recipe) -> dict[str, float]:
    """Response retrieval on held-out queries, once for each of the recipe's instructions."""
    scores: dict[str, float] = {}
    for number, prompt in enumerate(recipe.query_prompts):
        evaluator = ResponseRetrievalEvaluator([prompt + query for query in held["query"]], labels)
        scores.update({f"held_out_{number}_{key}": round(value, 4) for key, value in evaluator(model).items()})
    return scores


def _ridge_rows(rows: Dataset, labels: np.ndarray, recipe: Recipe) -> tuple[list[str], np.ndarray]:
    sample = np.random.default_rng(recipe.seed).permutation(len(rows))[: recipe.ridge_rows]
    return list(rows.select(sample)["query"]), labels[sample]


def _trainer(
    model: LLM2VecGen, dataset: Dataset, recipe: Recipe, folder: Path, progress: bool, report_to: str
) -> StudentTrainer:
    collator = StudentCollator(
        model.suffix_transformer,
        recipe.max_response_tokens,
        recon_share=recipe.recon_share if recipe.recon_weight else 0.0,
    )
    loss = LLM2VecGenLoss(
        model,
        recon_weight=recipe.recon_weight,
        align_weight=recipe.align_weight,
        align_reduction=recipe.align_reduction,
        margin_weight=recipe.margin_weight,
        margin_threshold=recipe.margin_threshold,
    )
    if not recipe.margin_weight:
        dataset = dataset.remove_columns([column for column in NEGATIVES if column in dataset.column_names])
    return StudentTrainer(
        model=model,
        args=_arguments(recipe, folder, progress, report_to),
        train_dataset=dataset,
        loss=loss,
        # The host asks for its own class, and uses no more of it than ours has.
        data_collator=cast(Any, collator),
    )


def _arguments(recipe: Recipe, folder: Path, progress: bool, report_to: str) -> SentenceTransformerTrainingArguments:
    return SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        learning_rate=recipe.learning_rate,
        learning_rate_mapping={
            name: rate
            for name, rate in (("mlp_recon", recipe.recon_learning_rate), ("mlp_align", recipe.align_learning_rate))
            if rate is not None
        },
        lr_scheduler_type=recipe.scheduler,
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps,
        save_steps=recipe.save_steps,
        save_total_limit=2,
        logging_steps=recipe.logging_steps,
        seed=recipe.seed,
        disable_tqdm=not progress,
        report_to=report_to,
        dataloader_pin_memory=False,
    )


def _announce(model: LLM2VecGen) -> None:
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    if not trainable:
        raise ValueError("Nothing would be trained: every parameter is frozen.")
    print(f"Trainable parameters: {trainable:,}; frozen: {frozen:,}.", flush=True)
