"""Training a student: recipes with the paper's numbers, warm start, and the host's trainer."""

from __future__ import annotations

from llm2vec_gen_st.training.collator import StudentCollator
from llm2vec_gen_st.training.grid import run_grid
from llm2vec_gen_st.training.recipes import RECIPES, Recipe, load_recipe
from llm2vec_gen_st.training.run import train
from llm2vec_gen_st.training.trainer import StudentTrainer
from llm2vec_gen_st.training.warm_start import ridge_heads, suffix_from_text

__all__ = [
    "RECIPES",
    "Recipe",
    "StudentCollator",
    "StudentTrainer",
    "load_recipe",
    "ridge_heads",
    "run_grid",
    "suffix_from_text",
    "train",
]
