"""The runs of the host's trainer that a recipe asks for, one after the other."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from llm2vec_gen_st.model import LLM2VecGen
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.training.recipes import Recipe

WHOLE = "whole"
RECONSTRUCTION = "reconstruction"


def stages(recipe: Recipe, rows: int) -> list[tuple[str, Recipe]]:
    """The whole student, then perhaps MLP_recon alone.

    Args:
        recipe: The recipe.
        rows: Training rows, documents included.

    Returns:
        Name of each stage, and the recipe with that stage's weights and steps.

    Raises:
        ValueError: If there are too few rows for this many processes.

    Example:
        >>> [(name, stage.max_steps) for name, stage in stages(Recipe(batch_size=8, recon_steps=5), 100)]
        [('whole', 13), ('reconstruction', 5)]
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # With several processes the host leaves out rows that are not enough for a batch in each of them.
    batches = math.ceil(rows / recipe.batch_size) if processes == 1 else rows // recipe.batch_size // processes
    if not batches:
        raise ValueError(
            f"{rows} rows are not enough for a batch of {recipe.batch_size} in each of {processes} processes."
        )
    steps = math.ceil(math.ceil(batches / recipe.gradient_accumulation) * recipe.epochs)
    # The host would go on past the epochs for as long as max_steps says.
    steps = min(steps, recipe.max_steps) if recipe.max_steps > 0 else steps
    found = [(WHOLE, replace(recipe, max_steps=steps))] if steps else []
    if recipe.recon_steps:
        alone = replace(recipe, max_steps=recipe.recon_steps, recon_weight=1.0, align_weight=0.0, margin_weight=0.0)
        found.append((RECONSTRUCTION, alone))
    return found


def select_trainable(model: LLM2VecGen, stage: str, recipe: Recipe) -> None:
    """Let those parameters require gradients that a stage trains.

    Args:
        model: The student.
        stage: Name of the stage.
        recipe: The whole run's recipe.
    """
    head = model.response_head
    own = [model.suffix_transformer.suffix, *head.parameters()]
    if model.suffix_transformer.lora is not None:
        own += lora_parameters(model.llm).values()
    for parameter in own:
        parameter.requires_grad_(stage == WHOLE)
    if head.mlp_recon is not None:
        # Without a reconstruction loss it stands still if its own stage is to come, or if ridge regression has set it:
        # MLP_align behind it can give whatever the alignment asks for, and trained both they pull each other away.
        still = not recipe.recon_weight and (recipe.recon_steps > 0 or recipe.init == "ridge")
        head.mlp_recon.requires_grad_(stage == RECONSTRUCTION or not still)
    if head.mlp_align is not None and not (recipe.align_weight or recipe.margin_weight):
        # No loss reaches it, and several processes would wait for its gradient.
        head.mlp_align.requires_grad_(False)
