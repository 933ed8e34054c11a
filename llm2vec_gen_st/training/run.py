"""train(): from queries and responses to a saved student, resumable, on the host's trainer."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.training.collator import StudentCollator
from llm2vec_gen_st.training.data import (
    LABEL,
    SENTENCE_DOCUMENT,
    load_rows,
    prepare_labels,
    split_held_out,
    student_rows,
)
from llm2vec_gen_st.training.evaluation import ResponseRetrievalEvaluator
from llm2vec_gen_st.training.recipes import RECIPES, Recipe, recipe_for
from llm2vec_gen_st.training.report import write_log
from llm2vec_gen_st.training.trainer import StudentTrainer
from llm2vec_gen_st.training.warm_start import reconstruction_only, ridge_alignment, ridge_heads, suffix_from_text

if TYPE_CHECKING:
    from datasets import Dataset

RUN_FOLDER = "training"
CHECKPOINTS = "checkpoints"
WHOLE = "whole"
RECONSTRUCTION = "reconstruction"


def train(
    data: str | Path | Dataset,
    output_dir: str | Path,
    *,
    base: str | Backbone = SMOLLM2_ID,
    teacher: str | SentenceTransformer | None = "all-MiniLM-L6-v2",
    recipe: str | Recipe | None = None,
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
            ``response`` (and ``label``, the teacher's vectors, if there is no teacher).
        output_dir: Where the student goes; ``training/`` inside it holds recipe, log, loss plot and, until the run has
            ended, the checkpoints.
        base: The frozen LLM: hub id, directory, or loaded backbone.
        teacher: ``"self"``, or a SentenceTransformer (loaded, name or directory); not used with a ``label`` column.
        recipe: Name in :data:`~llm2vec_gen_st.training.RECIPES` or a recipe; chosen by the base's family if not given.
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
    base_id = base if isinstance(base, str) else base.reference.id
    chosen = recipe if isinstance(recipe, Recipe) else _named(recipe or recipe_for(base_id))
    chosen = chosen.with_overrides(overrides)
    rows = load_rows(data, chosen, partial=partial)
    if chosen.align_weight and teacher is None and LABEL not in rows.column_names:
        raise ValueError(
            "The alignment loss needs a teacher, or a column 'label' with its vectors; or set align_weight=0."
        )
    require("accelerate", extra="train", why="training")
    output = Path(output_dir)
    run = output / RUN_FOLDER
    _claim(run, chosen, base_id, teacher, rows, start)

    backbone = load_backbone(base, model_kwargs={"dtype": chosen.dtype}) if isinstance(base, str) else base
    fit, held = split_held_out(rows, chosen)
    dataset = student_rows(fit, chosen)
    cache = label_cache or run / "labels.sqlite"
    labels = mean = held_labels = None
    if chosen.align_weight:
        labels, mean = prepare_labels(_vectors(dataset, teacher, backbone, cache, progress), chosen)
        dataset = _with_labels(dataset, labels)
        if len(held):
            held_labels, _ = prepare_labels(_vectors(held, teacher, backbone, cache, progress), chosen, mean)
    if start is not None:
        model = LLM2VecGen(str(start), backbone=backbone)
    else:
        model = LLM2VecGen.from_base(
            backbone,
            thought_tokens=chosen.thought_tokens,
            compression_tokens=chosen.compression_tokens,
            embedding_dim=backbone.hidden_size if labels is None else labels.shape[1],
            max_seq_length=chosen.max_seq_length,
            seed=chosen.seed,
        )
    stages = _stages(chosen, len(dataset))
    started = any(_last_checkpoint(run / CHECKPOINTS / name) is not None for name, _ in stages)
    if not started and start is None and chosen.init == "ridge":
        if labels is None:
            raise ValueError("A ridge start fits the teacher's embeddings; without alignment use init='random'.")
        suffix_from_text(model, chosen.suffix_text)
        fitted = ridge_heads(model, *_ridge_rows(dataset, labels, chosen), seed=chosen.seed, progress=progress)
        write_json(run / "ridge_start.json", asdict(fitted))
        print(f"Ridge start: held-out distance {fitted.held_out_loss:.3f} of the mean embedding's.", flush=True)
    _announce(model)

    if chosen.gradient_checkpointing:
        # Renamed in newer versions of transformers, which warn of the older name.
        enable = getattr(model.llm, "activation_checkpointing_enable", None) or model.llm.gradient_checkpointing_enable
        enable()
    history: list[dict[str, Any]] = []
    for name, stage in stages:
        _select_trainable(model, name, chosen)
        shown, context = dataset, cast(AbstractContextManager[None], nullcontext())
        if name == RECONSTRUCTION:
            # Sentences are parts of responses, which are there too; many as they are, they would crowd out the queries.
            shown = dataset.select(np.flatnonzero(np.array(dataset["kind"]) != SENTENCE_DOCUMENT))
            context = reconstruction_only(model, shown["query"][: chosen.ridge_rows], progress=progress)
        with context:
            trainer = _trainer(model, shown, stage, run / CHECKPOINTS / name, progress, report_to)
            checkpoint = _last_checkpoint(run / CHECKPOINTS / name)
            if checkpoint is not None and _step(checkpoint) >= stage.max_steps:
                # The host would take one more step than asked for.
                trainer.restore(checkpoint)
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
        done = history[-1]["step"] if history else 0
        history += [{**row, "step": row["step"] + done} for row in trainer.state.log_history]
        if name == WHOLE and chosen.ridge_refit and labels is not None:
            end = ridge_alignment(model, *_ridge_rows(dataset, labels, chosen), seed=chosen.seed, progress=progress)
            write_json(run / "ridge_end.json", asdict(end))
            print(f"Ridge refit: held-out distance {end.held_out_loss:.3f} of the mean embedding's.", flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        if held_labels is not None and len(held):
            history.append({"step": history[-1]["step"], **held_out_scores(model, held, held_labels, chosen)})
        write_log(run, history)
        model.save_pretrained(str(output))
        shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
    return model


def held_out_scores(model: LLM2VecGen, held: Dataset, labels: np.ndarray, recipe: Recipe) -> dict[str, float]:
    """Response retrieval on held-out queries, once for each of the recipe's instructions."""
    scores: dict[str, float] = {}
    for number, prompt in enumerate(recipe.query_prompts):
        evaluator = ResponseRetrievalEvaluator([prompt + query for query in held["query"]], labels)
        scores.update({f"held_out_{number}_{key}": round(value, 4) for key, value in evaluator(model).items()})
    return scores


def _named(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"Unknown recipe {name!r}; known are {sorted(RECIPES)}.")
    return RECIPES[name]


def _vectors(
    rows: Dataset, teacher: str | SentenceTransformer | None, backbone: Backbone, cache: str | Path, progress: bool
) -> np.ndarray:
    if LABEL in rows.column_names:
        return np.asarray(rows[LABEL], dtype=np.float32)
    assert teacher is not None
    return teacher_embeddings(list(rows["response"]), teacher, backbone=backbone, cache=cache, progress=progress)


def _ridge_rows(rows: Dataset, labels: np.ndarray, recipe: Recipe) -> tuple[list[str], np.ndarray]:
    sample = np.random.default_rng(recipe.seed).permutation(len(rows))[: recipe.ridge_rows]
    return list(rows.select(sample)["query"]), labels[sample]


def _with_labels(rows: Dataset, labels: np.ndarray) -> Dataset:
    kept = rows.remove_columns(LABEL) if LABEL in rows.column_names else rows
    return kept.add_column(LABEL, list(labels))


def _stages(recipe: Recipe, rows: int) -> list[tuple[str, Recipe]]:
    """The runs of the host's trainer: the whole student, then perhaps MLP_recon alone."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batches = math.ceil(rows / (recipe.batch_size * processes))
    steps = math.ceil(math.ceil(batches / recipe.gradient_accumulation) * recipe.epochs)
    # The host would go on past the epochs for as long as max_steps says.
    steps = min(steps, recipe.max_steps) if recipe.max_steps > 0 else steps
    stages = [(WHOLE, replace(recipe, max_steps=steps))] if steps else []
    if recipe.recon_steps:
        alone = replace(recipe, max_steps=recipe.recon_steps, recon_weight=1.0, align_weight=0.0)
        stages.append((RECONSTRUCTION, alone))
    return stages


def _select_trainable(model: LLM2VecGen, stage: str, recipe: Recipe) -> None:
    head = model.response_head
    for parameter in (model.suffix_transformer.suffix, *head.parameters()):
        parameter.requires_grad_(stage == WHOLE)
    if head.mlp_recon is not None and recipe.recon_steps:
        head.mlp_recon.requires_grad_(stage == RECONSTRUCTION or recipe.recon_weight > 0)


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
    )
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


def _claim(run: Path, recipe: Recipe, base: str, teacher: Any, rows: Dataset, start: str | Path | None) -> None:
    """Record what this run is, and refuse a folder that holds another one."""
    texts = json.dumps([list(rows["query"]), list(rows["response"])]).encode("utf-8", "backslashreplace")
    wanted = {
        "base": base,
        "start": None if start is None else Path(start).name,
        "teacher": teacher if isinstance(teacher, str) or teacher is None else type(teacher).__name__,
        "rows": len(rows),
        "data_sha256": hashlib.sha256(texts).hexdigest(),
        "recipe": json.loads(json.dumps(asdict(recipe))),
    }
    path = run / "recipe.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        different = sorted(key for key in wanted if found.get(key) != wanted[key])
        if different:
            raise ValueError(
                f"{run} holds another training run (different: {', '.join(different)}). Repeat its command to go on "
                "with it, or choose another output folder."
            )
    write_json(path, wanted)


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the host writes ``trainer_state.json`` last."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    return max(found, key=_step, default=None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _announce(model: LLM2VecGen) -> None:
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    if not trainable:
        raise ValueError("Nothing would be trained: every parameter is frozen.")
    print(f"Trainable parameters: {trainable:,}; frozen: {frozen:,}.", flush=True)
