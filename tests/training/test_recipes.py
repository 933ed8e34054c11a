"""Recipes as data: those of the paper, files of one's own, and what a call may replace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm2vec_gen_st.backbone import SMOLLM2_ID
from llm2vec_gen_st.baselines.llm2vec import published_adapters
from llm2vec_gen_st.checkpoints.registry import KNOWN_MODELS
from llm2vec_gen_st.prompts import QUERY
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import RECIPES, Recipe, load_recipe, train
from llm2vec_gen_st.training.recipes import recipe_for, resolve

from .tiny import TINY, rows

STUDENTS = {
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "Qwen3-06B"),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "Qwen3-17B"),
    "qwen3-4b": ("Qwen/Qwen3-4B", "Qwen3-4B"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen3-8B"),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen25-05B-Instruct"),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen25-15B-Instruct"),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B-Instruct", "Qwen25-3B-Instruct"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "Qwen25-7B-Instruct"),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B-Instruct", "Meta-Llama-32-1B-Instruct"),
    "llama3.2-3b": ("meta-llama/Llama-3.2-3B-Instruct", "Meta-Llama-32-3B-Instruct"),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-31-8B-Instruct"),
}


@pytest.mark.parametrize("name", STUDENTS)
def test_every_student_of_the_paper_is_a_recipe(name: str) -> None:
    """Paper: AdamW 3e-4 (Qwen-3) or 5e-4, linear, 100 warm-up steps, batch 32, one epoch, length 512, 10 + 10, bf16."""
    base, tag = STUDENTS[name]
    recipe, first = RECIPES[name], f"McGill-NLP/LLM2Vec-{tag}-mntp"
    assert recipe.base == base
    assert recipe.teacher is not None
    assert published_adapters(recipe.teacher) == [first, f"{first}-unsup-simcse"]
    assert recipe.learning_rate == (3e-4 if name.startswith("qwen3") else 5e-4)
    assert (recipe.scheduler, recipe.warmup_steps, recipe.batch_size, recipe.epochs) == ("linear", 100, 32, 1.0)
    assert (recipe.thought_tokens, recipe.compression_tokens, recipe.init) == (10, 10, "random")
    assert (recipe.max_seq_length, recipe.max_response_tokens, recipe.dtype) == (512, 512, "bfloat16")
    assert recipe.gradient_checkpointing
    assert (recipe.recon_weight, recipe.align_weight, recipe.margin_weight, recipe.lora_rank) == (1.0, 1.0, 0.0, 0)
    assert recipe_for(base) == recipe_for(f"some/where/{base.rpartition('/')[2]}") == name


def test_recipes_and_known_models_agree() -> None:
    for model in KNOWN_MODELS:
        recipe = RECIPES[model.name.removeprefix("llm2vec-gen-")]
        assert recipe.base == model.base_id
        if model.teacher_adapters is not None:
            assert recipe.teacher == model.teacher_adapters[1]


def test_built_in_recipes_name_what_the_built_in_models_were_made_of() -> None:
    for name, teacher in (("smollm2-135m", "all-MiniLM-L6-v2"), ("smollm2-135m-self", "self")):
        assert (RECIPES[name].base, RECIPES[name].teacher) == (SMOLLM2_ID, teacher)
    assert QUERY in RECIPES["smollm2-135m"].query_prompts, "a recipe's instruction is the one used at inference"
    assert recipe_for(SMOLLM2_ID) == "smollm2-135m"


def test_an_unknown_model_gets_its_familys_settings_and_no_teacher() -> None:
    for base, family in (("my/Qwen2.5-14B", "qwen2.5"), ("x/Llama-3.3-70B-Instruct", "llama3"), ("x/y", "qwen3")):
        assert recipe_for(base) == family
        assert resolve(None, base=base).teacher is None


def test_a_model_of_no_known_family_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for base, warned in (("x/y", True), ("my/Qwen2.5-14B", False)):
        caplog.clear()
        recipe_for(base)
        assert [base in record.getMessage() for record in caplog.records] == [True] * warned


def test_a_file_extends_a_recipe_or_another_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"extends": "qwen3-4b", "lora_rank": 8, "comment": "mine"}))
    (tmp_path / "more").mkdir()
    path = tmp_path / "more" / "other.json"
    path.write_text(json.dumps({"extends": "../mine.json", "batch_size": 16, "include": ["ok", "cut_off"]}))
    expected = dataclasses.replace(RECIPES["qwen3-4b"], lora_rank=8, batch_size=16, include=("ok", "cut_off"))
    assert load_recipe(path) == load_recipe(str(path)) == expected
    assert expected.lora == {"r": 8, "lora_alpha": 16.0, "target_modules": list(expected.lora_targets)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"extends": "qwen4"}, "Unknown recipe 'qwen4'.*qwen3-4b"),
        ({"extends": "gone.json"}, "gone.json is missing"),
        ({"extends": "mine.json"}, r"circle: mine.json -> mine.json"),
        ({"extends": 3}, "mine.json.*must be texts"),
        ({"lora_rnk": 8}, r"mine.json.*Unknown recipe fields \['lora_rnk'\]"),
        ({"batch_size": 2.5}, "mine.json: batch_size must be a int, got 2.5"),
        ({"batch_size": True}, "batch_size must be a int, got True"),
        ({"ridge_refit": 1}, "ridge_refit must be true or false, got 1"),
        ({"include": [1]}, r"include must be a list of texts, got \[1\]"),
        ({"base": ["a"]}, r"base must be a str, got \['a'\]"),
        ({"whitening": 2}, r"mine.json.*whitening must be from 0 to 1, got 2"),
        ([], "expected a JSON object"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


_VALUES: dict[str, Any] = {
    "int": st.integers(-10, 1000),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "str": st.text(),
    "bool": st.booleans(),
}


@settings(max_examples=50)
@given(st.data())
def test_a_recipe_survives_its_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(Recipe):
        kind = str(field.type).removesuffix(" | None")
        if kind in _VALUES:
            changes[field.name] = data.draw(_VALUES[kind].filter(lambda value: value != "none"))
        elif kind == "tuple[str, ...]":
            changes[field.name] = tuple(data.draw(st.lists(st.text())))
    changes["whitening"] = data.draw(st.floats(0, 1))
    recipe = dataclasses.replace(Recipe(), **changes)
    path = tmp_path_factory.mktemp("recipe") / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(recipe)), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_what_a_call_gives_comes_before_what_the_recipe_says() -> None:
    recipe = resolve("qwen3-4b", base="my/copy", teacher="self", overrides={"thought_tokens": "0"})
    assert (recipe.base, recipe.teacher, recipe.thought_tokens) == ("my/copy", "self", 0)
    assert resolve("qwen3-4b") == RECIPES["qwen3-4b"]
    assert resolve(None) == RECIPES["smollm2-135m"]
    with pytest.raises(ValueError, match="names a base model"):
        resolve("qwen3")


def test_a_recipes_base_and_teacher_are_used_and_its_record_is_a_recipe(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    for part in (backbone.llm, backbone.tokenizer):
        part.save_pretrained(tmp_path / "base")
    fields = {key: value for key, value in dataclasses.asdict(TINY).items() if key not in ("teacher", "max_steps")}
    own = tmp_path / "mine.json"
    own.write_text(json.dumps({**fields, "base": str(tmp_path / "base"), "teacher": "self", "max_steps": 2}))
    data = rows().remove_columns("label")
    one = train(data, tmp_path / "one", recipe=own, progress=False)
    assert one.suffix_transformer.base.id == str(tmp_path / "base")
    assert one.response_head.embedding_dim == 64, "the LLM's own width: its own embeddings are the targets"
    again = train(data, tmp_path / "two", recipe=tmp_path / "one" / "training" / "recipe.json", progress=False)
    assert (one.encode(["honey"]) == again.encode(["honey"])).all()


def test_a_run_recorded_before_a_field_existed_goes_on(tmp_path: Path) -> None:
    def run(**changes: Any) -> None:
        train(rows(), tmp_path, base=tiny_backbone(), recipe=TINY, progress=False, max_steps=1, **changes)

    run()
    path = tmp_path / "training" / "recipe.json"
    record = json.loads(path.read_text())
    for field in ("lora_rank", "margin_weight"):
        del record["recipe"][field]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"a training run made differently \(recipe.lora_rank: 0 there, 2 now\)"):
        run(lora_rank=2)
    run()
    assert json.loads(path.read_text()) == record
