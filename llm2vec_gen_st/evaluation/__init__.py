"""Evaluation over mteb: generative instructions per task, the paper's benchmarks, one's own data, and reports."""

from __future__ import annotations

from llm2vec_gen_st.evaluation.instructions import built_in_instructions, instructions_for, load_instructions
from llm2vec_gen_st.evaluation.report import write_report
from llm2vec_gen_st.evaluation.results import Result, read_results
from llm2vec_gen_st.evaluation.runner import EvaluationError, evaluate
from llm2vec_gen_st.evaluation.tasks import find_tasks

__all__ = [
    "EvaluationError",
    "Result",
    "built_in_instructions",
    "evaluate",
    "find_tasks",
    "instructions_for",
    "load_instructions",
    "read_results",
    "write_report",
]
