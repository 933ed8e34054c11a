"""Run tasks with one model, resumably, and keep what came out with everything it depends on."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from llm2vec_gen_st.evaluation.fingerprints import describe_model, digest_of_json, library_versions
from llm2vec_gen_st.evaluation.instructions import Side, default_instructions, instruction_of, load_instructions
from llm2vec_gen_st.evaluation.report import check_baseline, write_report
from llm2vec_gen_st.evaluation.results import Result, read_result, read_results, result_path, write_result
from llm2vec_gen_st.evaluation.tasks import find_tasks
from llm2vec_gen_st.extras import require

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask
    from mteb.types import EncodeKwargs
    from sentence_transformers import SentenceTransformer

logger = logging.getLogger(__name__)


class EvaluationError(RuntimeError):
    """Some tasks could not be run; the results of the others are kept."""


def evaluate(
    model: SentenceTransformer,
    tasks: str | AbsTask | Iterable[str | AbsTask],
    output: str | Path,
    *,
    name: str | None = None,
    instructions: str | Path | Mapping[str, str] | None = None,
    batch_size: int = 32,
    baseline: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> list[Result]:
    """Evaluate a model on tasks, and bring the tables and plots in the output folder up to date.

    A task is run again only if something changed that its scores depend on: the model's weights or settings, the
    instructions, the data, or a library. Several models may share an output folder; they are then compared.

    Args:
        model: A student, or any other SentenceTransformer.
        tasks: What :func:`~llm2vec_gen_st.evaluation.tasks.find_tasks` takes: groups (``mteb-lite``, ``mteb-eng-v2``,
            ``bright``, ``advbench-ir``), names, folders, tasks.
        output: Folder of the results.
        name: What the model is called in files and tables; its card's name or its class if not given.
        instructions: A file (see :func:`~llm2vec_gen_st.evaluation.instructions.load_instructions`), or mteb's names of
            prompts to instructions, with nothing added (``{}`` for no instructions). If not given, a student gets the
            built-in ones and its own, and any other model its own.
        batch_size: Texts run at once.
        baseline: Name of the model in the output folder against which the others are compared.
        overwrite: Whether tasks are run again in any case.
        progress: Whether progress bars are shown.

    Returns:
        The results on these tasks, in their order.

    Raises:
        MissingExtraError: If mteb is not installed.
        ValueError: If a task or the baseline is not known, or a file is not what it should be, or if the output folder
            holds results on other tasks of another model of this name.
        EvaluationError: If tasks failed; the others have been run, and their results are kept.
    """
    output = Path(output)
    name = name or model.model_card_data.model_name or type(model).__name__
    found = find_tasks(tasks)
    require("matplotlib", extra="mteb", why="plots of results")
    check_baseline(output, baseline, name)
    if instructions is None:
        prompts: Mapping[str, str] = default_instructions(model)
    else:
        prompts = instructions if isinstance(instructions, Mapping) else load_instructions(instructions)
    described, versions = describe_model(model), library_versions()
    names = {task.metadata.name for task in found}
    kept = [result for result in read_results(output) if result.name == name and result.task_name not in names]
    # Found out before anything is run.
    if kept and kept[0].model != described:
        raise ValueError(
            f"{output} holds results on {', '.join(result.task_name for result in kept)} of another model of the name "
            f"{name!r}. Evaluate it on these tasks too, or give it another name."
        )
    results: list[Result] = []
    failed: dict[str, Exception] = {}
    for task in found:
        sides = _sides(model, task, prompts)
        meta = _describe_task(task)
        key = digest_of_json({"model": described, "task": meta, "instructions": sides, "versions": versions})
        path = result_path(output, name, task.metadata.name)
        if not overwrite and path.is_file() and (known := read_result(path)).key == key:
            logger.info("%s: unchanged, the result in %s is kept.", task.metadata.name, path)
            results.append(known)
            continue
        logger.info("%s: instructions %s", task.metadata.name, sides)
        try:
            score, scores, texts, seconds = _run(model, task, sides, batch_size=batch_size, progress=progress)
        except Exception as error:  # Whatever it is, it must not cost the results of the other tasks.
            logger.exception("%s failed.", task.metadata.name)
            failed[task.metadata.name] = error
            continue
        results.append(
            Result(
                key,
                name,
                meta,
                sides,
                described,
                versions,
                batch_size,
                str(model.device),
                score,
                scores,
                texts,
                seconds,
            )
        )
        write_result(output, results[-1])
    no_report = ""
    if results:
        try:
            write_report(output, baseline=baseline)
        except ValueError as error:
            if not failed:
                raise
            no_report = f" No tables were written: {error}"
    if failed:
        reasons = "; ".join(f"{task} ({type(error).__name__}: {error})" for task, error in failed.items())
        raise EvaluationError(
            f"{len(failed)} of {len(found)} tasks failed: {reasons}. The results of the others are in {output}; "
            f"the same call again runs only what is missing.{no_report}"
        ) from next(iter(failed.values()))
    return results


def _sides(model: SentenceTransformer, task: AbsTask, prompts: Mapping[str, str]) -> dict[str, str]:
    """The sides of a task, each with the instruction put before its texts."""
    from mteb.abstasks import AbsTaskRetrieval

    sides: list[Side] = ["query", "document"] if isinstance(task, AbsTaskRetrieval) else []
    if not sides:
        # The two texts of a pair may be told apart by the task.
        kinds = [getattr(task, f"input{number}_prompt_type", None) for number in (1, 2)]
        sides = list(dict.fromkeys("text" if kind is None else kind.value for kind in kinds))
    default = prompts.get(model.default_prompt_name or "", "")
    meta = task.metadata
    return {side: instruction_of(prompts, meta.name, meta.type, side, default=default) for side in sides}


def _describe_task(task: AbsTask) -> dict[str, Any]:
    meta = task.metadata
    return {
        "name": meta.name,
        "type": meta.type,
        "metric": meta.main_score,
        "data": dict(meta.dataset),
        "splits": list(task.eval_splits),
        "subsets": list(task.hf_subsets),
    }


def _run(
    model: SentenceTransformer, task: AbsTask, sides: Mapping[str, str], *, batch_size: int, progress: bool
) -> tuple[float, dict[str, Any], int, float]:
    """Main score, all scores, texts embedded and seconds."""
    import mteb

    from llm2vec_gen_st.evaluation.encoder import InstructedEncoder

    # A task draws from these as it runs; every model gets the same draws, also from a task that has been run before.
    task.rng_state, task.np_rng = random.Random(task.seed), np.random.default_rng(task.seed)
    encoder = InstructedEncoder(model, sides)
    options = cast("EncodeKwargs", {"batch_size": batch_size, "show_progress_bar": progress})
    start = time.perf_counter()
    with _progress_bars(progress):
        run = mteb.evaluate(
            encoder, task, cache=None, co2_tracker=False, encode_kwargs=options, show_progress_bar=progress
        )
    (found,) = run.task_results
    score = float(found.get_score())
    if not math.isfinite(score):
        raise ValueError(f"the score {task.metadata.main_score} is {score}; are all embeddings the same?")
    return score, _finite(found.to_dict()["scores"]), encoder.texts, time.perf_counter() - start


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Leave out the bars that loading data shows of its own accord."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _finite(value: Any) -> Any:
    """The same value with ``None`` for numbers that JSON has no form for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
