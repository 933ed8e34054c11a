"""train(): from queries and responses to a saved student, resumable, on the host's trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.base.modules import Normalize

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.host_checkpoints import last_checkpoint
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.lora import lora_parameters, lora_removed_on_failure
from llm2vec_gen_st.modules.truncation import warn_once_if_cut
from llm2vec_gen_st.teachers import teacher_name
from llm2vec_gen_st.training.collator import StudentCollator
from llm2vec_gen_st.training.data import LABEL, NEGATIVES, load_rows, split_held_out, student_rows
from llm2vec_gen_st.training.evaluation import ResponseRetrievalEvaluator, held_out_evaluators
from llm2vec_gen_st.training.processes import (
    agreed_folder,
    is_main,
    join_processes,
    on_cpu,
    share_parameters,
    wait_for_all,
)
from llm2vec_gen_st.training.recipes import Recipe, resolve
from llm2vec_gen_st.training.record import RUN_FOLDER, claimed
from llm2vec_gen_st.training.report import write_log
from llm2vec_gen_st.training.stages import RECONSTRUCTION, WHOLE, select_trainable, stages
from llm2vec_gen_st.training.teaching import Targets, with_targets
from llm2vec_gen_st.training.trainer import StudentTrainer
from llm2vec_gen_st.training.warm_start import (
    RidgeReport,
    reconstruction_only,
    ridge_alignment,
    ridge_heads,
    suffix_from_text,
)
from llm2vec_gen_st.training.whitening import whiten_alignment

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
    report_to: str | Sequence[str] = "none",
    evaluator: BaseEvaluator | Sequence[BaseEvaluator] = (),
    trainer_arguments: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> LLM2VecGen:
    """Train a student and save it; the same call again goes on where a stopped one was (paper, section 3).

    Under ``torchrun`` or ``accelerate launch`` the processes train together: each takes ``batch_size`` rows a step, and
    its share of the teacher's and the ridge regressions' passes; the main process writes all files.

    A student whose target vectors have length 1 ends with :class:`~sentence_transformers.base.modules.Normalize`.

    Args:
        data: A folder of responses, a ``.jsonl`` or ``.parquet`` file, or a dataset with the columns ``query`` and
            ``response`` (and ``label``, the teacher's vectors, if there is no teacher); see
            :func:`~llm2vec_gen_st.training.data.load_rows` for hard negatives.
        output_dir: Where the student goes; ``training/`` inside it holds recipe, log, loss plot and, until the run has
            ended, the checkpoints.
        base: The frozen LLM: hub id, directory, or loaded backbone; the recipe's if not given.
        teacher: ``"self"``, a SentenceTransformer (loaded, name or directory), a published LLM2Vec adapter, or a folder
            that ``train_llm2vec`` wrote; the recipe's if not given; not used with a ``label`` column.
        recipe: Name in :data:`~llm2vec_gen_st.training.RECIPES`, a JSON file
            (:func:`~llm2vec_gen_st.training.recipes.load_recipe`) or a recipe; chosen by the base if not given, and
            that of the built-in model if that is not given either.
        start: A saved student to go on from, instead of an untrained one; with ``epochs=0`` only the recipe's
            ``recon_steps`` are run.
        label_cache: SQLite file of teacher embeddings; ``training/labels.sqlite`` if not given.
        partial: Whether a folder whose responses are not all written yet is accepted.
        progress: Whether progress bars are shown.
        report_to: The host's experiment trackers: ``tensorboard`` (which writes to ``training/tensorboard``),
            ``trackio``, ``wandb``, ...
        evaluator: Evaluators of sentence-transformers, run on the student every ``eval_steps`` steps.
        trainer_arguments: Further arguments of the host's trainer, which decide how a run is made and not what comes
            out, such as ``{"torch_compile": True}`` on CUDA; another call may go on with others.
        **overrides: Fields of the recipe to replace.

    Returns:
        The trained student.

    Raises:
        ValueError: If columns are missing or unknown (before the base is loaded), nothing would be trained, the folder
            holds another run, or an argument is the recipe's to decide.
        CheckpointError: If a checkpoint from which to go on is damaged; names the file, and what to do.
        OSError: If the disk is full; what was there before is kept.
        FloatingPointError: If training has left values that are not finite; nothing is saved then.
    """
    evaluators = [evaluator] if isinstance(evaluator, BaseEvaluator) else list(evaluator)
    chosen = resolve(
        recipe,
        base=base.reference.id if isinstance(base, Backbone) else base,
        teacher=teacher if isinstance(teacher, str) else None,
        overrides=overrides,
    )
    assert chosen.base is not None
    taught_by = chosen.teacher if teacher is None or isinstance(teacher, str) else teacher
    if evaluators and not chosen.eval_steps:
        raise ValueError("An evaluator runs every eval_steps steps; set eval_steps.")
    if chosen.init == "ridge" and not chosen.align_weight and start is None:
        raise ValueError("A ridge start fits the teacher's embeddings; without alignment use init='random'.")
    rows = load_rows(data, chosen, partial=partial)
    if chosen.align_weight and taught_by is None and LABEL not in rows.column_names:
        raise ValueError(
            "The alignment loss needs a teacher, or a column 'label' with its vectors; or set align_weight=0."
        )
    require("accelerate", extra="train", why="training")
    join_processes()
    progress = progress and is_main()
    output = Path(output_dir)
    run = output / RUN_FOLDER
    settings = _Settings(progress, report_to, evaluators, dict(trainer_arguments or {}))
    # What the trainer would refuse, it refuses before hours of work.
    _arguments(chosen, run / CHECKPOINTS, settings, evaluated=False)
    with claimed(run, chosen, None if taught_by is None else teacher_name(taught_by), rows, start):
        return _make(
            output, chosen, rows, base=base, teacher=taught_by, start=start, label_cache=label_cache, settings=settings
        )


def _make(
    output: Path,
    chosen: Recipe,
    rows: Dataset,
    *,
    base: str | Backbone | None,
    teacher: str | SentenceTransformer | None,
    start: str | Path | None,
    label_cache: str | Path | None,
    settings: _Settings,
) -> LLM2VecGen:
    """Train and save the student of a recipe that is complete, in a folder that is claimed; returns it."""
    assert chosen.base is not None
    run = output / RUN_FOLDER
    backbone = base if isinstance(base, Backbone) else load_backbone(chosen.base, model_kwargs={"dtype": chosen.dtype})
    fit, held = split_held_out(rows, chosen)
    dataset = student_rows(fit, chosen)
    targets: Targets | None = None
    if chosen.align_weight:
        cache = label_cache or run / "labels.sqlite"
        targets = with_targets(dataset, held, chosen, teacher, backbone, cache=cache, progress=settings.progress)
        dataset = targets.rows
    labels = None if targets is None else targets.labels
    if targets is not None and targets.held_out is not None:
        held_out = held_out_evaluators(held["query"], targets.held_out, chosen.query_prompts)
    else:
        held_out = []
    settings = replace(settings, evaluators=[*held_out, *settings.evaluators])
    # A backbone that the caller gave is the caller's again if anything fails.
    with lora_removed_on_failure(backbone.llm):
        model = _student(backbone, chosen, labels, start)
        normalized = isinstance(model[-1], Normalize)
        if normalized:
            # The losses compare what the heads give.
            model.pop(-1)
        history = _run_stages(model, chosen, dataset, labels, run, fresh=start is None, settings=settings)
    _check_trained(model, run)
    if normalized or (labels is not None and _unit_length(labels)):
        model.append(Normalize())
    # The main process takes the checkpoints away below, which others may still be reading.
    wait_for_all()
    if is_main():
        if held_out:
            steps = sum(stage.max_steps for _, stage in stages(chosen, len(dataset)))
            history.append({"step": steps, **held_out_scores(model, held_out)})
        _finish(model, output, history)
    return model


@dataclass(frozen=True)
class _Settings:
    """How a run is made, apart from its recipe."""

    progress: bool
    report_to: str | Sequence[str]
    evaluators: list[BaseEvaluator]
    trainer_arguments: dict[str, Any]


def _check_trained(model: LLM2VecGen, run: Path) -> None:
    """Refuse a student whose training has come to nothing, before it replaces anything."""
    own = {"the suffix": [model.suffix_transformer.suffix], "the heads": model.response_head.parameters()}
    if model.suffix_transformer.lora is not None:
        own["the LoRA layers"] = lora_parameters(model.llm).values()
    bad = [name for name, weights in own.items() if not all(bool(weight.isfinite().all()) for weight in weights)]
    if bad:
        raise FloatingPointError(
            f"Training has left values that are not finite in {' and '.join(bad)}, so the student was not saved. Its "
            f"checkpoints are in {run / CHECKPOINTS}; train into another folder with a lower learning rate, and look "
            "for unusual rows."
        )


def _finish(model: LLM2VecGen, output: Path, history: list[dict[str, Any]]) -> None:
    """Write what a run leaves behind, and take its checkpoints away."""
    run = output / RUN_FOLDER
    try:
        write_log(run, history)
        model.save_pretrained(str(output))
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"The trained student could not be saved in {output} ({type(error).__name__}: {error}). Its last "
            f"checkpoint is in {run / CHECKPOINTS}; make room if the disk is full, and repeat the command."
        ) from error
    if (run / CHECKPOINTS).exists():
        # In one step: half of these folders would look like a run to go on with.
        done = run / f".{CHECKPOINTS}.done"
        shutil.rmtree(done, ignore_errors=True)
        os.replace(run / CHECKPOINTS, done)
        shutil.rmtree(done, ignore_errors=True)


def _unit_length(labels: np.ndarray) -> bool:
    """Whether the student is to give vectors of length 1, as its teacher does.

    By the squared distance a student's own are the shorter the less sure it is: classifiers with a penalty on weights
    would see little of them.
    """
    return bool(np.allclose(np.linalg.norm(labels, axis=1), 1.0, atol=1e-3))


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
    transformer = model.suffix_transformer
    own = transformer.thought_tokens, transformer.compression_tokens
    if own != (recipe.thought_tokens, recipe.compression_tokens):
        raise ValueError(
            f"The student {start} has {own[0]} thought and {own[1]} compression tokens, the recipe "
            f"{recipe.thought_tokens} and {recipe.compression_tokens}; set thought_tokens={own[0]} and "
            f"compression_tokens={own[1]}."
        )
    transformer.max_seq_length = recipe.max_seq_length
    rank = (transformer.lora or {"r": 0})["r"]
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
    settings: _Settings,
) -> list[dict[str, Any]]:
    """Run every stage to its end, from where a stopped run was; returns the log."""
    parts = stages(recipe, len(dataset))
    progress = settings.progress
    newest = {name: agreed_folder(last_checkpoint(run / CHECKPOINTS / name)) for name, _ in parts}
    started = any(checkpoint is not None for checkpoint in newest.values())
    if not started and fresh and recipe.init == "ridge":
        assert labels is not None
        suffix_from_text(model, recipe.suffix_text)
        fitted = ridge_heads(model, *_ridge_rows(dataset, labels, recipe), seed=recipe.seed, progress=progress)
        _report_ridge("start", run, fitted, model)
    elif not (started or fresh) and recipe.whitening and labels is not None and WHOLE in dict(parts):
        # A saved student may have been whitened; the alignment goes on from the teacher's own space.
        fitted = ridge_alignment(model, *_ridge_rows(dataset, labels, recipe), seed=recipe.seed, progress=progress)
        _report_ridge("start", run, fitted, model)
    _announce(model)

    if recipe.gradient_checkpointing:
        # Renamed in newer versions of transformers, which warn of the older name.
        enable = getattr(model.llm, "activation_checkpointing_enable", None) or model.llm.gradient_checkpointing_enable
        enable()
    history: list[dict[str, Any]] = []
    done = 0
    for name, stage in parts:
        select_trainable(model, name, recipe)
        context = cast(AbstractContextManager[None], nullcontext())
        if name == RECONSTRUCTION:
            context = reconstruction_only(model, dataset["query"][: recipe.ridge_rows], progress=progress)
        with context:
            with _tensorboard_in(run / "tensorboard" / name):
                trainer = _trainer(model, dataset, stage, run / CHECKPOINTS / name, settings, evaluated=name == WHOLE)
            with warn_once_if_cut(model.suffix_transformer.text_limit, "the recipe's max_seq_length"):
                trainer.run_to(stage.max_steps, newest[name])
        history += [{**row, "step": row["step"] + done} for row in trainer.state.log_history]
        done += stage.max_steps
        if name == WHOLE and recipe.ridge_refit and labels is not None:
            end = ridge_alignment(model, *_ridge_rows(dataset, labels, recipe), seed=recipe.seed, progress=progress)
            _report_ridge("end", run, end, model)
        if name == WHOLE and recipe.whitening and labels is not None:
            whiten_alignment(model, _ridge_rows(dataset, labels, recipe)[0], recipe.whitening, progress=progress)
            share_parameters(list(model.response_head.parameters()))
    return history


def _report_ridge(when: str, run: Path, report: RidgeReport, model: LLM2VecGen) -> None:
    """Say how good a ridge regression is; every process goes on with the main process's."""
    share_parameters([model.suffix_transformer.suffix, *model.response_head.parameters()])
    if is_main():
        write_json(run / f"ridge_{when}.json", asdict(report))
        print(f"Ridge {when}: held-out distance {report.held_out_loss:.3f} of the mean embedding's.", flush=True)


@contextmanager
def _tensorboard_in(folder: Path) -> Iterator[None]:
    """Let TensorBoard's files go beside the log, unless the user has said where; the host takes it from here only."""
    name = "TENSORBOARD_LOGGING_DIR"
    said = os.environ.get(name)
    os.environ[name] = said or str(folder)
    try:
        yield
    finally:
        if said is None:
            del os.environ[name]


def held_out_scores(model: LLM2VecGen, evaluators: Sequence[ResponseRetrievalEvaluator]) -> dict[str, float]:
    """Scores of the held-out evaluators, rounded for the log."""
    return {key: round(value, 4) for evaluator in evaluators for key, value in evaluator(model).items()}


def _ridge_rows(rows: Dataset, labels: np.ndarray, recipe: Recipe) -> tuple[list[str], np.ndarray]:
    sample = np.random.default_rng(recipe.seed).permutation(len(rows))[: recipe.ridge_rows]
    return list(rows.select(sample)["query"]), labels[sample]


def _trainer(
    model: LLM2VecGen, dataset: Dataset, recipe: Recipe, folder: Path, settings: _Settings, *, evaluated: bool
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
        args=_arguments(recipe, folder, settings, evaluated=evaluated and bool(recipe.eval_steps)),
        train_dataset=dataset,
        loss=loss,
        evaluator=settings.evaluators if evaluated and recipe.eval_steps else None,
        # The host asks for its own class, and uses no more of it than ours has.
        data_collator=cast(Any, collator),
    )


def _arguments(
    recipe: Recipe, folder: Path, settings: _Settings, *, evaluated: bool
) -> SentenceTransformerTrainingArguments:
    decided: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "learning_rate": recipe.learning_rate,
        "learning_rate_mapping": {
            name: rate
            for name, rate in (("mlp_recon", recipe.recon_learning_rate), ("mlp_align", recipe.align_learning_rate))
            if rate is not None
        },
        "lr_scheduler_type": recipe.scheduler,
        "warmup_steps": recipe.warmup_steps,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.max_grad_norm,
        "num_train_epochs": recipe.epochs,
        "max_steps": recipe.max_steps,
        "save_steps": recipe.save_steps,
        "logging_steps": recipe.logging_steps,
        "seed": recipe.seed,
        "eval_strategy": "steps" if evaluated and settings.evaluators else "no",
        "eval_steps": recipe.eval_steps or None,
        "disable_tqdm": not settings.progress,
        "report_to": settings.report_to,
        "use_cpu": on_cpu(),
    }
    taken = sorted(decided.keys() & settings.trainer_arguments.keys())
    if taken:
        raise ValueError(f"trainer_arguments {taken} are decided by the recipe, or by train() itself.")
    return SentenceTransformerTrainingArguments(
        **decided, **{"dataloader_pin_memory": False, **settings.trainer_arguments}
    )


def _announce(model: LLM2VecGen) -> None:
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    if not trainable:
        raise ValueError("Nothing would be trained: every parameter is frozen.")
    if is_main():
        print(f"Trainable parameters: {trainable:,}; frozen: {frozen:,}.", flush=True)
