"""The dry run: its counts are those of a real student, its memory and cost those that a real step is measured at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.cli import app
from llm2vec_gen_st.files import write_rows
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import RECIPES, Recipe, StudentCollator, train
from llm2vec_gen_st.training.data import load_rows, student_rows
from llm2vec_gen_st.training.estimate import estimate
from llm2vec_gen_st.training.recipes import resolve

from .tiny import TINY, WIDTH, rows, with_negatives

QWEN3_4B = Qwen3Config(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip


def test_qwen3_4b_trains_about_13_million_parameters() -> None:
    """Paper: 13 M trainable at Qwen3-4B, one linear layer for each head, 10 + 10 suffix tokens."""
    found = estimate(RECIPES["qwen3-4b"], config=QWEN3_4B)
    assert found.embedding_dim == 2560
    assert found.trainable == 20 * 2560 + 2 * (2560 * 2560 + 2560) == 13_163_520
    assert found.frozen == pytest.approx(4.02e9, rel=0.01)
    weights, trained = list(found.memory.values())[:2]
    assert weights == 2 * found.frozen
    assert trained == 16 * found.trainable
    (cost,) = found.stages
    assert (cost.name, cost.steps) == ("whole", None), "how many steps depends on the rows"
    more = estimate(RECIPES["qwen3-4b"].with_overrides({"lora_rank": 8}), config=QWEN3_4B)
    sizes = ((2560, 4096), (2560, 1024), (2560, 1024), (4096, 2560), (2560, 9728), (2560, 9728), (9728, 2560))
    assert more.trainable - found.trainable == 36 * 8 * sum(one + other for one, other in sizes)
    assert more.frozen == found.frozen
    student = "student pass: what backward needs"
    assert more.memory[student] > 3 * found.memory[student], "with LoRA the query's own tokens are kept for backward"


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 3}], ids=str)
def test_counts_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    backbone = tiny_backbone()
    recipe = resolve(TINY, base="tiny", overrides={**changes, "max_steps": 1})
    found = estimate(recipe, student_rows(load_rows(rows(), recipe), recipe), config=backbone.llm.config)
    train(rows(), tmp_path, base=backbone, recipe=recipe, progress=False)
    assert f"Trainable parameters: {found.trainable:,}; frozen: {found.frozen:,}." in capsys.readouterr().out
    assert (found.embedding_dim, found.rows, [stage.steps for stage in found.stages]) == (WIDTH, 16, [1])


FAMILIES = {
    "llama": LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "qwen3": Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    ),
}  # fmt: skip


class _Operations(TorchDispatchMode):
    """Counts as torch's own FLOP counter, which cannot follow a gradient taken during the forward pass."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


class _Step:
    """One step's batch at full length, on a real student in bfloat16."""

    def __init__(self, family: str, recipe: Recipe) -> None:
        backbone = tiny_backbone(FAMILIES[family])
        backbone.llm.to(torch.bfloat16)
        self.model = LLM2VecGen.from_base(
            backbone, thought_tokens=recipe.thought_tokens, compression_tokens=recipe.compression_tokens,
            embedding_dim=64, max_seq_length=recipe.max_seq_length, lora=recipe.lora, device="cpu",
        )  # fmt: skip
        long = "river " * recipe.max_seq_length
        batch = StudentCollator(self.model.suffix_transformer, recipe.max_response_tokens)(
            [{"query": long, "response": long}] * recipe.batch_size
        )
        assert batch["query_input_ids"].shape[1] == recipe.max_seq_length - 8
        assert batch["response_input_ids"].shape[1] == recipe.max_response_tokens
        names = ("query", "response") if recipe.recon_weight else ("query",)
        self.features = [{key: batch[f"{name}_{key}"] for key in ("input_ids", "attention_mask")} for name in names]
        self.loss = LLM2VecGenLoss(self.model, recon_weight=recipe.recon_weight)
        self.labels = torch.zeros(recipe.batch_size, 64)

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.loss(self.features, self.labels).values())).sum()

    def kept_bytes(self) -> int:
        """Storage that backward needs, parameters left out."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        seen: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.forward()
        return sum(storage.nbytes() for storage in seen.values())

    def flops(self) -> int:
        # Other kinds of attention are one operation, which is not counted everywhere.
        with sdpa_kernel(SDPBackend.MATH), _Operations() as counter:
            self.forward().backward()
        return counter.total


CASES = [{"recon_weight": 0.0}, {}, {"recon_weight": 0.0, "lora_rank": 4}]
FULL = TINY.with_overrides({"max_seq_length": 88, "max_response_tokens": 40, "base": "tiny", "dtype": "bfloat16"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_memory_is_what_backward_keeps(family: str, changes: dict[str, Any]) -> None:
    recipe = FULL.with_overrides(changes)
    found = estimate(recipe, config=FAMILIES[family], device="cpu")
    expected = sum(size for what, size in found.memory.items() if "pass" in what)
    assert expected == pytest.approx(_Step(family, recipe).kept_bytes(), rel=0.25)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_cost_is_what_a_step_takes(family: str, changes: dict[str, Any]) -> None:
    # Short rows: causal attention is counted at half of what the measured kind computes.
    recipe = FULL.with_overrides({**changes, "max_seq_length": 40, "max_response_tokens": 16})
    (stage,) = estimate(recipe, config=FAMILIES[family]).stages
    assert stage.tokens == 4 * (40 + (4 + 16 - 1 if recipe.recon_weight else 0))
    assert stage.flops == pytest.approx(_Step(family, recipe).flops(), rel=0.2)


def test_cost_follows_the_rows_and_the_recipe() -> None:
    config = FAMILIES["llama"]

    def cost(**changes: Any) -> float:
        recipe = FULL.with_overrides(changes)
        return estimate(recipe, config=config).stages[0].flops

    assert cost(gradient_accumulation=3) == pytest.approx(3 * cost())
    assert cost(recon_weight=0.0) < cost(recon_share=0.5) < cost() < cost(gradient_checkpointing=True)
    assert cost(margin_weight=1.0) - cost() == pytest.approx(cost(recon_weight=0.0)), "as many rows again"
    both = estimate(FULL.with_overrides({"recon_weight": 0.0, "recon_steps": 7, "max_steps": 5}), config=config).stages
    assert [(stage.name, stage.steps) for stage in both] == [("whole", 5), ("reconstruction", 7)]
    assert both[1].flops > both[0].flops
    for changes in ({"gradient_accumulation": 4}, {"epochs": 0.5}):
        (stage,) = estimate(FULL.with_overrides({"max_steps": 100, **changes}), config=config).stages
        assert stage.steps == 100, changes


def _dry_run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["train", *map(str, arguments), "--dry-run"], env={"COLUMNS": "160"})


def test_command_needs_a_config_and_nothing_else(tmp_path: Path) -> None:
    tiny_backbone().llm.config.save_pretrained(tmp_path / "base")
    result = _dry_run("--recipe", "qwen3-4b", "--base", tmp_path / "base", "--set", "lora_rank=4")
    assert result.exit_code == 0, result.output
    for shown in ("lora_rank", "trainable", "GiB", "FLOPs a step", "ASSUMED", "no rows yet"):
        assert shown in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"], "nothing was written"


def test_command_counts_the_rows_that_are_there(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    backbone.llm.config.save_pretrained(tmp_path / "base")
    backbone.tokenizer.save_pretrained(tmp_path / "base")
    data = tmp_path / "data.jsonl"
    write_rows(data, with_negatives(rows()).to_list())
    result = _dry_run(data, "--recipe", "qwen3", "--base", tmp_path / "base", "--set", "batch_size=4")
    assert result.exit_code == 0, result.output
    assert "mean of 16 rows; 16 rows" in " ".join(result.output.split())
    assert f"{WIDTH} (column 'label')" in result.output
    wrong = _dry_run(data, "--recipe", "qwen3", "--base", tmp_path / "base", "--set", "document_sources=query")
    assert wrong.exit_code == 1
    assert "need a teacher for these texts" in wrong.output


def test_command_names_a_base_that_it_cannot_find(tmp_path: Path) -> None:
    result = _dry_run("--recipe", "qwen3", "--base", "no/such-model")
    assert result.exit_code == 1
    assert "'no/such-model'" in result.output
    assert "config.json" in result.output
    assert "Traceback" not in result.output


def test_command_names_responses_that_are_not_there(tmp_path: Path) -> None:
    for arguments in ([tmp_path / "typo"], [tmp_path / "typo", "--dry-run"]):
        result = CliRunner().invoke(app, ["train", *map(str, arguments)])
        assert result.exit_code == 1
        assert "typo" in result.output
    without = CliRunner().invoke(app, ["train", "--output", str(tmp_path / "student")])
    assert without.exit_code == 1
    assert "needs responses" in without.output


def test_info_shows_a_students_recipe(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    for part in (backbone.llm, backbone.tokenizer):
        part.save_pretrained(tmp_path / "base")
    train(rows(), tmp_path / "student", base=str(tmp_path / "base"), recipe=TINY, max_steps=1, progress=False)
    result = CliRunner().invoke(app, ["info", str(tmp_path / "student")], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for name, value in (("trained, rows", "16"), ("recipe, learning_rate", "0.001"), ("recipe, max_steps", "1")):
        assert any(name in line and value in line for line in result.output.splitlines()), name
    assert "recipe, weight_decay" not in result.output, "defaults are left out"
