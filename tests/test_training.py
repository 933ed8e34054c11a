"""Training: what changes and what must not, resuming, columns, loss accounting, and learning (C1-C4, D1)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.interpret import decode_ids
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.testing import saved_base, tiny_backbone, tiny_model
from llm2vec_gen_st.training import RECIPES, Recipe, StudentCollator, ridge_heads, suffix_from_text, train
from llm2vec_gen_st.training import run as run_module
from llm2vec_gen_st.training.data import (
    load_rows,
    prepare_labels,
    split_held_out,
    student_rows,
    with_prompts,
)
from llm2vec_gen_st.training.record import read_record
from llm2vec_gen_st.training.warm_start import ridge_map

TINY = Recipe(
    thought_tokens=4,
    compression_tokens=4,
    learning_rate=1e-3,
    warmup_steps=0,
    epochs=100,
    batch_size=4,
    dtype="float32",
    logging_steps=1,
    save_steps=1000,
    max_seq_length=128,
    max_response_tokens=48,
)

PAIRS = [
    ("where do polar bears live?", "Polar bears live on sea ice in the Arctic and hunt seals."),
    ("who makes honey?", "Bees make honey and wax from the nectar of flowers."),
    ("what is a river?", "Rivers carry water from the mountains to the sea."),
    ("write a function", "def add(a, b): return a + b"),
    ("what do seals fear?", "They fear polar bears, who hunt on the ice."),
    ("what are flowers for?", "The nectar of flowers is what bees carry."),
    ("where does water go?", "From mountains water is carried to the sea."),
    ("what is wax?", "Wax is what bees make when they make honey."),
]


def rows(count: int = 16, width: int = 12, seed: int = 0) -> Dataset:
    """Queries, responses and random teacher vectors."""
    labels = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    chosen = [PAIRS[row % len(PAIRS)] for row in range(count)]
    return Dataset.from_dict(
        {
            "query": [f"{query} ({row})" for row, (query, _) in enumerate(chosen)],
            "response": [response for _, response in chosen],
            "label": list(labels),
        }
    )


def losses(folder: Path, key: str = "loss") -> list[float]:
    """Values of one key of a run's log, in order."""
    lines = (folder / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(row[key]) for row in map(json.loads, lines) if key in row]


def test_base_is_untouched_and_student_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C1: every base tensor is byte-identical after training; suffix and both heads are not."""
    backbone = tiny_backbone()
    assert backbone.llm.get_output_embeddings().weight is backbone.llm.get_input_embeddings().weight
    before = {name: tensor.clone() for name, tensor in backbone.llm.state_dict().items()}
    untrained = LLM2VecGen.from_base(backbone, thought_tokens=4, compression_tokens=4, embedding_dim=12, seed=TINY.seed)
    start = {name: value.detach().clone() for name, value in untrained.named_parameters() if value.requires_grad}
    model = train(rows(), tmp_path, base=backbone, teacher=None, recipe=TINY, max_steps=3, progress=False)
    for name, tensor in backbone.llm.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert {name.partition(".")[2] for name in start} == {
        "suffix",
        "mlp_recon.weight",
        "mlp_recon.bias",
        "mlp_align.weight",
        "mlp_align.bias",
    }
    for name, value in model.named_parameters():
        if value.requires_grad:
            assert not torch.equal(value.detach(), start[name]), name
    printed = capsys.readouterr().out
    trainable = sum(value.numel() for value in start.values())
    assert f"Trainable parameters: {trainable:,}" in printed
    assert not model.llm.training


def test_nothing_to_train_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: a run that could not change anything does not start."""
    original = LLM2VecGen.from_base.__func__  # type: ignore[attr-defined]

    def frozen(cls: type[LLM2VecGen], *args: Any, **kwargs: Any) -> LLM2VecGen:
        model: LLM2VecGen = original(cls, *args, **kwargs)
        return model.requires_grad_(False)

    monkeypatch.setattr(LLM2VecGen, "from_base", classmethod(frozen))
    with pytest.raises(ValueError, match="Nothing would be trained"):
        train(rows(), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, progress=False)


RESUME_SCRIPT = """
import sys
from transformers import AutoModelForCausalLM, TrainerCallback
from llm2vec_gen_st.training import train
from llm2vec_gen_st.training import trainer as trainer_module
sys.path.insert(0, {tests!r})
from test_training import TINY, rows

built = []
original = AutoModelForCausalLM.from_pretrained
AutoModelForCausalLM.from_pretrained = classmethod(lambda cls, *a, **k: built.append(1) or original(*a, **k))

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if {stop} and state.global_step == {stop}:
            import os
            os._exit(9)

init = trainer_module.StudentTrainer.__init__
def with_stop(self, *args, **kwargs):
    init(self, *args, **kwargs)
    self.add_callback(Stop())
trainer_module.StudentTrainer.__init__ = with_stop
train(rows(64), {out!r}, base={base!r}, teacher=None, recipe=TINY, max_steps=40, save_steps=10, progress=False)
print("BUILT", len(built))
"""


def test_resumed_run_repeats_the_unbroken_one(tmp_path: Path) -> None:
    """C2: killed after step 25 and started again in a new process, steps 21 to 40 have the losses of one run."""
    base = str(saved_base(tmp_path / "base"))
    settings = {"tests": str(Path(__file__).parent), "base": base}

    def run(out: Path, stop: int) -> subprocess.CompletedProcess[str]:
        script = RESUME_SCRIPT.format(out=str(out), stop=stop, **settings)
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    straight = run(tmp_path / "straight", 0)
    assert straight.returncode == 0, straight.stderr[-2000:]
    killed = run(tmp_path / "broken", 25)
    assert killed.returncode == 9, killed.stderr[-2000:]
    assert (tmp_path / "broken" / "training" / "checkpoints" / "whole" / "checkpoint-20").is_dir()
    resumed = run(tmp_path / "broken", 0)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert "BUILT 1" in resumed.stdout
    expected, found = losses(tmp_path / "straight"), losses(tmp_path / "broken")
    assert len(expected) == len(found) == 40
    np.testing.assert_allclose(found[20:], expected[20:], atol=1e-4)
    assert not (tmp_path / "broken" / "training" / "checkpoints").exists()
    text = ["where do polar bears live?"]
    one, two = (LLM2VecGen(str(tmp_path / name)).encode(text) for name in ("straight", "broken"))
    np.testing.assert_allclose(one, two, atol=1e-4)


def test_finished_folder_holds_no_pickle(tmp_path: Path) -> None:
    """B5: nothing that a finished run leaves behind is a pickle."""
    train(rows(), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=2, progress=False)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.suffix in {".json", ".safetensors", ".md", ".jsonl", ".png", ".sqlite"}, path


def test_a_folder_is_free_again_if_nothing_came_of_a_call(tmp_path: Path) -> None:
    data = rows().remove_columns("label")
    with pytest.raises(OSError, match="no-such-teacher"):
        train(data, tmp_path, base=tiny_backbone(), teacher=str(tmp_path / "no-such-teacher"), recipe=TINY)
    train(data, tmp_path, base=tiny_backbone(), teacher="self", recipe=TINY, max_steps=1, progress=False)
    with pytest.raises(ValueError, match="teacher: 'self' there, 'another' now"):
        train(data, tmp_path, base=tiny_backbone(), teacher="another", recipe=TINY, max_steps=1)
    assert read_record(tmp_path) is not None


def test_loaded_teachers_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    data = rows().remove_columns("label")
    options: dict[str, Any] = {"base": tiny_backbone(), "recipe": TINY, "max_steps": 1, "progress": False}
    train(data, tmp_path, teacher=tiny_model(seed=1), **options)
    with pytest.raises(ValueError, match=r"teacher: 'LLM2VecGen-.*' there, 'LLM2VecGen-.*' now"):
        train(data, tmp_path, teacher=tiny_model(seed=2), **options)


def test_other_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """A folder that holds one run is not mixed with another."""
    train(rows(), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=1, progress=False)
    with pytest.raises(ValueError, match=r"a training run made differently \(recipe.max_steps: 1 there, 2 now\)"):
        train(rows(), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=2, progress=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.remove_columns("response"), "response"),
        (lambda data: data.add_column("text", ["x"] * 16), "text"),
    ],
)
def test_wrong_columns_are_named_before_the_base_is_loaded(tmp_path: Path, change: Any, named: str) -> None:
    """C3: the base model named here does not exist, and it is never looked for."""
    with pytest.raises(ValueError, match=named):
        train(change(rows()), tmp_path, base="no/such-model", teacher=None, recipe=TINY)


@pytest.mark.parametrize(
    ("later", "named"),
    [
        ({"query": "c", "response": "d", "unknown": 1}, "unknown: \\['unknown'\\]"),
        ({"query": "c"}, "Row 1: the column 'response' should be text, but found null"),
        ({"query": 3, "response": "d"}, "Row 1: the column 'query' should be text, but found int"),
    ],
)
def test_every_row_of_a_file_is_checked(tmp_path: Path, later: dict[str, Any], named: str) -> None:
    """C3: also what only a later row has."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"query": "a", "response": "b"}, later]))
    with pytest.raises((ValueError, TypeError), match=named):
        load_rows(path, TINY)


def test_flags_count_in_whatever_row_they_first_appear(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    later = [{"query": "c", "response": "d", "flag": "non_finite"}, {"query": "e", "response": ""}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"query": "a", "response": "b"}, *later]))
    assert load_rows(path, TINY)["query"] == ["a"]


def test_a_label_that_is_not_finite_is_named(tmp_path: Path) -> None:
    data = rows().to_dict()
    data["label"][3][2] = float("nan")
    with pytest.raises(ValueError, match="'label' holds values that are not finite in 1 training rows"):
        train(Dataset.from_dict(data), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=2)


def test_other_labels_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    train(rows(), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=1, progress=False)
    data = rows().to_dict()
    data["label"][0][0] += 1
    with pytest.raises(ValueError, match="data_sha256"):
        train(Dataset.from_dict(data), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=1)


def test_a_student_that_came_to_nothing_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_stages = run_module._run_stages

    def spoiled(model: LLM2VecGen, *args: Any, **kwargs: Any) -> Any:
        history = run_stages(model, *args, **kwargs)
        model.suffix_transformer.suffix.data[0, 0] = float("nan")
        return history

    monkeypatch.setattr(run_module, "_run_stages", spoiled)
    with pytest.raises(FloatingPointError, match="not finite in the suffix, so the student was not saved"):
        train(rows(), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=1, progress=False)
    assert not (tmp_path / "modules.json").exists()


def test_a_run_stopped_behind_its_last_step_can_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: also if no step of it was ever logged."""
    settings: dict[str, Any] = {"base": tiny_backbone(), "teacher": None, "recipe": TINY, "progress": False}
    settings |= {"max_steps": 3, "logging_steps": 10, "held_out": 4, "save_steps": 3}
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_finish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(rows(32), tmp_path, **settings)
    train(rows(32), tmp_path, **settings)
    last = json.loads((tmp_path / "training" / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3
    assert (tmp_path / "modules.json").is_file()


def test_a_ridge_start_without_alignment_is_refused_before_the_folder_is_taken(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"base": tiny_backbone(), "teacher": None, "recipe": TINY, "align_weight": 0.0}
    with pytest.raises(ValueError, match="init='random'"):
        train(rows(), tmp_path, init="ridge", max_steps=1, **settings)
    train(rows(), tmp_path, init="random", max_steps=1, progress=False, **settings)


def test_another_suffix_than_the_started_students_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(str(tmp_path / "start"))
    with pytest.raises(ValueError, match="4 thought and 4 compression tokens, the recipe 8 and 2"):
        train(
            rows(), tmp_path / "run", base=tiny_backbone(), teacher=None, recipe=TINY, start=tmp_path / "start",
            max_steps=1, thought_tokens=8, compression_tokens=2,
        )  # fmt: skip


def test_a_ridge_regression_needs_three_rows() -> None:
    with pytest.raises(ValueError, match="three rows or more, got 2"):
        ridge_map(torch.randn(2, 4), np.zeros((2, 3)))


def test_columns_are_taken_by_name(tmp_path: Path) -> None:
    """C3: the order of columns changes nothing."""
    data = rows()
    for name, dataset in (("one", data), ("two", data.select_columns(["label", "response", "query"]))):
        train(dataset, tmp_path / name, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=3, progress=False)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")


def test_alignment_needs_a_teacher_or_labels(tmp_path: Path) -> None:
    """C3: without either, the error comes first."""
    with pytest.raises(ValueError, match="needs a teacher"):
        train(rows().remove_columns("label"), tmp_path, base="no/such-model", teacher=None, recipe=TINY)


def test_flagged_responses_are_left_out_by_default() -> None:
    """C5: training skips what is not ok."""
    data = rows(4).add_column("flag", ["ok", "cut_off", "empty", "ok"])
    assert len(load_rows(data, TINY)) == 2
    assert len(load_rows(data, TINY.with_overrides({"include": ("ok", "cut_off")}))) == 3
    with pytest.raises(ValueError, match="No training rows are left"):
        load_rows(rows(1).add_column("flag", ["empty"]), TINY)


def test_cut_off_response_has_no_end_to_learn() -> None:
    """A response that was broken off must not teach that it ends there."""
    model = tiny_model()
    collator = StudentCollator(model.suffix_transformer)
    whole, cut = (
        collator([{"query": "q", "response": "Bees make honey", "flag": flag}])["response_input_ids"][0].tolist()
        for flag in ("ok", "cut_off")
    )
    assert whole[:-1] == cut
    assert whole[-1] == model.tokenizer.eos_token_id


def test_loss_parts_are_logged_and_sum_to_the_total(tmp_path: Path) -> None:
    """C4: reconstruction and alignment, weighted, are the loss."""
    train(
        rows(), tmp_path, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=3, recon_weight=0.5,
        align_weight=2.0, progress=False,
    )  # fmt: skip
    parts = [losses(tmp_path, key) for key in ("loss", "reconstruction", "alignment")]
    for total, reconstruction, alignment in zip(*parts, strict=True):
        assert total == pytest.approx(reconstruction + alignment, abs=2e-3)
        assert reconstruction > 0
        assert alignment > 0


def test_accumulated_batches_match_one_big_batch(tmp_path: Path) -> None:
    """C4: responses differ in length, so this holds only if losses are divided by the tokens of the whole step."""
    found = []
    for name, options in (("big", {"batch_size": 8}), ("small", {"batch_size": 2, "gradient_accumulation": 4})):
        model = train(
            rows(), tmp_path / name, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=2, progress=False,
            **options,
        )  # fmt: skip
        found.append({key: value.detach() for key, value in model.named_parameters() if value.requires_grad})
    np.testing.assert_allclose(losses(tmp_path / "big"), losses(tmp_path / "small"), atol=1e-3)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    """C4: same losses with and without."""
    for name, on in (("off", False), ("on", True)):
        train(
            rows(), tmp_path / name, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=3, progress=False,
            gradient_checkpointing=on,
        )  # fmt: skip
    np.testing.assert_allclose(losses(tmp_path / "off"), losses(tmp_path / "on"), atol=1e-4)


DISTRIBUTED_SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_training import TINY, rows
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import train
from safetensors.torch import save_file
import os
model = train(rows(), {out!r}, base=tiny_backbone(), teacher=None, recipe=TINY, max_steps=3, progress=False,
              batch_size={batch})
rank = os.environ.get("RANK", "0")
trained = {{n: p.detach().contiguous() for n, p in model.named_parameters() if p.requires_grad}}
save_file(trained, {out!r} + f"/rank{{rank}}.safetensors")
"""


@pytest.mark.slow
def test_two_processes_match_one(tmp_path: Path) -> None:
    """C4: two gloo processes end with equal trainables, those of one process with the same step."""
    from safetensors.torch import load_file

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    found = {}
    for name, count, batch in (("one", 1, 8), ("two", 2, 4)):
        script = tmp_path / f"{name}.py"
        out = tmp_path / name
        script.write_text(DISTRIBUTED_SCRIPT.format(tests=str(Path(__file__).parent), out=str(out), batch=batch))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), str(script)]
        done = subprocess.run(
            command if count > 1 else [sys.executable, str(script)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = [load_file(out / f"rank{rank}.safetensors") for rank in range(count)]
    first, second = found["two"]
    for name, value in found["one"][0].items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, atol=1e-4, rtol=1e-3)


def test_overfitted_soft_prompts_decode_to_their_responses() -> None:
    """D1: after overfitting 8 pairs, greedy decoding returns the first 10 tokens of at least 7 responses."""
    torch.manual_seed(0)
    model = tiny_model()
    llm = model.llm
    # A random LLM cannot be steered by a soft prompt, so this one first learns to write these sentences.
    ids = [model.suffix_transformer.response_ids([response], 64)[0] for _, response in PAIRS]
    texts = [[model.tokenizer.eos_token_id, *row] for row in ids]
    llm.requires_grad_(True)
    optimizer = torch.optim.AdamW(llm.parameters(), lr=3e-3)
    for _ in range(120):
        loss = torch.stack(
            [llm(input_ids=torch.tensor([row]), labels=torch.tensor([row])).loss for row in texts]
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    llm.requires_grad_(False)
    loss_function = LLM2VecGenLoss(model, align_weight=0.0)
    collator = StudentCollator(model.suffix_transformer)
    batch = collator([{"query": query, "response": response} for query, response in PAIRS])
    features = [
        {key: batch[f"{column}_{key}"] for key in ("input_ids", "attention_mask")} for column in ("query", "response")
    ]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    for _ in range(300):
        loss = loss_function(features, None)["reconstruction"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prompts = model.encode_soft_prompts([query for query, _ in PAIRS])
    decoded = model.decode(prompts, max_new_tokens=40)
    assert decoded == model.decode(prompts, max_new_tokens=40)
    found = decode_ids(model.backbone, prompts, max_new_tokens=10)
    assert sum(row == target[:10] for row, target in zip(found, ids, strict=True)) >= 7, decoded


def test_ridge_start_is_the_regression_it_claims_to_be() -> None:
    """The heads reproduce a linear teacher that the states determine, and the report's loss says so."""
    model = tiny_model()
    suffix_from_text(model, "The answer to this is:")
    texts = [f"{query} {row}" for row in range(60) for query, _ in PAIRS]
    from llm2vec_gen_st.training.warm_start import mean_states

    states = mean_states(model, texts, progress=False)
    truth = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    labels = (states @ truth).numpy()
    report = ridge_heads(model, texts, labels, progress=False)
    assert report.held_out_loss < 0.02
    found = model.encode(texts)
    assert np.square(found - labels).sum() / np.square(labels - labels.mean(axis=0)).sum() < 0.02
    recon = model.response_head.mlp_recon
    assert recon is not None
    assert torch.equal(recon.weight, torch.eye(64) * recon.weight[0, 0])
    chance = ridge_heads(model, texts, np.random.default_rng(0).normal(size=(len(texts), 48)), progress=False)
    assert chance.held_out_loss > 0.9


def test_reconstruction_stage_keeps_the_embeddings(tmp_path: Path) -> None:
    """MLP_recon changes, MLP_align is set anew behind it, and every embedding stays what it was."""
    backbone = tiny_backbone()
    first = train(rows(), tmp_path / "one", base=backbone, teacher=None, recipe=TINY, max_steps=4, progress=False)
    texts = [query for query, _ in PAIRS]
    before, prompts = first.encode(texts), first.encode_soft_prompts(texts)
    second = train(
        rows(), tmp_path / "two", base=backbone, teacher=None, recipe=TINY, start=tmp_path / "one", epochs=0,
        recon_steps=6, recon_learning_rate=1e-2, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(second.encode(texts), before, atol=1e-4)
    assert not torch.allclose(second.encode_soft_prompts(texts), prompts, atol=1e-2)
    found = losses(tmp_path / "two", "reconstruction")
    assert found[-1] < found[0]
    again = LLM2VecGen(str(tmp_path / "two"), backbone=backbone)
    np.testing.assert_allclose(again.encode(texts), second.encode(texts), atol=1e-6)


def test_a_student_gives_vectors_of_length_one_if_its_teacher_does(tmp_path: Path) -> None:
    """By its loss they would be shorter, and their lengths would mean nothing; the loss itself sees the heads' own."""
    data = rows()
    unit = [[x / float(np.linalg.norm(row)) for x in row] for row in data["label"]]
    normal = data.remove_columns("label").add_column("label", unit)
    losses = {}
    for name, given, start in (("plain", data, None), ("unit", normal, None), ("next", normal, "unit")):
        from_there = None if start is None else tmp_path / start
        student = train(given, tmp_path / name, base=tiny_backbone(), recipe=TINY, max_steps=2, start=from_there)
        log = [json.loads(line) for line in (tmp_path / name / "training" / "log.jsonl").read_text().splitlines()]
        losses[name] = [row["alignment"] for row in log if "alignment" in row]
        for model in (student, LLM2VecGen(str(tmp_path / name), backbone=tiny_backbone())):
            assert len(model) == (2 if name == "plain" else 3)
            lengths = np.linalg.norm(model.encode(given["query"][:5]), axis=1)
            assert (abs(lengths - 1) < 1e-5).all() == (name != "plain")
    assert losses["next"][0] < losses["unit"][0], "the second run goes on with the heads of the first"


def test_suffix_from_text_takes_its_last_tokens() -> None:
    """Short texts repeat, long ones keep their end."""
    model = tiny_model()
    ids = model.suffix_transformer.text_tokenizer.ids("Where do polar bears live? Who makes honey?").ids
    suffix_from_text(model, "Where do polar bears live? Who makes honey?")
    assert torch.equal(model.suffix_transformer.suffix, model.llm.get_input_embeddings().weight[ids[-8:]])
    suffix_from_text(model, "x")
    assert torch.equal(model.suffix_transformer.suffix[0], model.suffix_transformer.suffix[-1])


def test_ridge_run_with_documents_learns(tmp_path: Path) -> None:
    """The built-in models' way: documents, a teacher, held-out scores; training lowers the loss."""
    model = train(
        rows(48).remove_columns("label"), tmp_path, base=tiny_backbone(), teacher="self", recipe="smollm2-135m",
        thought_tokens=4, compression_tokens=4, epochs=20, max_steps=12, warmup_steps=0, logging_steps=1, held_out=8,
        dtype="float32", normalize_labels=True, learning_rate=3e-3, batch_size=16, recon_steps=6,
        recon_learning_rate=1e-3, progress=False,
    )  # fmt: skip
    for key in ("alignment", "reconstruction"):
        found = losses(tmp_path, key)
        assert len(found) == {"alignment": 12, "reconstruction": 6}[key]
        assert np.mean(found[-3:]) < np.mean(found[:3]), key
    start, end = (json.loads((tmp_path / "training" / f"ridge_{name}.json").read_text()) for name in ("start", "end"))
    assert end["held_out_loss"] <= start["held_out_loss"] + 0.05
    log = (tmp_path / "training" / "log.jsonl").read_text(encoding="utf-8")
    assert "held_out_0_response_recall_at_1" in log
    assert (tmp_path / "training" / "loss.png").stat().st_size > 5000
    again = LLM2VecGen(str(tmp_path), backbone=model.backbone)
    np.testing.assert_allclose(again.encode("honey"), model.encode("honey"), atol=1e-6)


def test_steps_end_with_the_epochs(tmp_path: Path) -> None:
    """max_steps stops a run earlier, and never makes it go on."""
    for name, most, expected in (("all", -1, 4), ("fewer", 3, 3), ("no more", 50, 4)):
        folder = tmp_path / name
        train(rows(), folder, base=tiny_backbone(), teacher=None, recipe=TINY, epochs=1, max_steps=most, progress=False)
        assert len(losses(folder)) == expected


def test_document_rows_are_their_own_targets() -> None:
    """Responses and queries serve as documents behind the document's instruction."""
    data = rows(2).remove_columns("label").add_column("flag", ["ok", "cut_off"])
    recipe = TINY.with_overrides({"document_sources": ("response", "query"), "query_prompts": ("", "Q: ")})
    built = student_rows(data, recipe)
    assert built["query"][1] == "Q: " + data["query"][1]
    assert built["query"][2] == recipe.document_prompt + data["response"][0]
    assert built["response"][4] == data["query"][0]
    assert built["flag"] == ["ok", "cut_off", "ok", "cut_off", "ok", "ok"]


def test_unknown_sources_of_documents_are_named() -> None:
    """A source that is not known is refused."""
    with pytest.raises(ValueError, match="paragraph"):
        student_rows(rows(2), TINY.with_overrides({"document_sources": ("paragraph",)}))


def test_labels_are_centred_with_the_training_mean() -> None:
    """Held-out labels are moved by the same vector as training labels."""
    recipe = TINY.with_overrides({"center_labels": True, "normalize_labels": True})
    labels, mean = prepare_labels(np.array([[1.0, 2.0], [3.0, 6.0]], np.float32), recipe)
    np.testing.assert_allclose(mean, [2.0, 4.0])
    np.testing.assert_allclose(np.linalg.norm(labels, axis=1), 1.0, atol=1e-6)
    held, _ = prepare_labels(np.array([[2.0, 5.0]], np.float32), recipe, mean)
    np.testing.assert_allclose(held, [[0.0, 1.0]])


def test_split_is_fixed_by_the_seed() -> None:
    """Held-out queries are the same in every process, and in neither part twice."""
    recipe = TINY.with_overrides({"held_out": "5"})
    fit, held = split_held_out(rows(), recipe)
    again = split_held_out(rows(), recipe)[1]
    assert held["query"] == again["query"]
    assert (len(fit), len(held)) == (13, 3), "never more than a fifth is kept out"
    assert not set(fit["query"]) & set(held["query"])


def test_recipes_hold_the_papers_numbers() -> None:
    """Paper: AdamW 3e-4 (Qwen-3) and 5e-4 (Qwen-2.5, Llama), 100 warm-up steps, batch 32, length 512, 10 + 10."""
    for name, rate in (("qwen3", 3e-4), ("qwen2.5", 5e-4), ("llama3", 5e-4)):
        recipe = RECIPES[name]
        assert (recipe.learning_rate, recipe.warmup_steps, recipe.batch_size, recipe.epochs) == (rate, 100, 32, 1.0)
        assert (recipe.thought_tokens, recipe.compression_tokens, recipe.init) == (10, 10, "random")
        assert (recipe.max_seq_length, recipe.max_response_tokens, recipe.dtype) == (512, 512, "bfloat16")
        assert recipe.gradient_checkpointing


def test_overrides_are_converted_and_checked() -> None:
    """Strings from the command line become numbers; unknown names are refused with the known ones."""
    recipe = TINY.with_overrides({"batch_size": "8", "center_labels": "true", "include": "ok,cut_off"})
    assert (recipe.batch_size, recipe.center_labels, recipe.include) == (8, True, ("ok", "cut_off"))
    with pytest.raises(ValueError, match="lora_rnk"):
        TINY.with_overrides({"lora_rnk": 8})
    with pytest.raises(ValueError, match="batch_size must be a int"):
        TINY.with_overrides({"batch_size": "many"})
    assert with_prompts(["a"], ["p "]) == ["p a"]


def test_overrides_follow_the_declared_type_of_a_field_not_its_value() -> None:
    """A rate that is a number in a recipe can be taken away again, and one that is not can be set."""
    recipe = RECIPES["smollm2-135m"]
    assert recipe.align_learning_rate is not None
    for none in (None, "none"):
        assert recipe.with_overrides({"align_learning_rate": none}).align_learning_rate is None
    assert recipe.with_overrides({"align_learning_rate": "1e-3"}).align_learning_rate == 1e-3
    assert TINY.with_overrides({"recon_learning_rate": "2e-3"}).recon_learning_rate == 2e-3
    with pytest.raises(ValueError, match="recon_learning_rate must be a float, got 'fast'"):
        TINY.with_overrides({"recon_learning_rate": "fast"})
    with pytest.raises(ValueError, match="learning_rate must be a float, got 'none'"):
        TINY.with_overrides({"learning_rate": "none"})
    with pytest.raises(ValueError, match="init must be one of random, ridge, got 'rigde'"):
        TINY.with_overrides({"init": "rigde"})
    assert TINY.with_overrides({"suffix_text": "none", "include": ["ok"]}).suffix_text == "none"
    for field in dataclasses.fields(Recipe):
        value = getattr(recipe, field.name)
        written = ",".join(value) if isinstance(value, tuple) else str(value).lower() if value is None else str(value)
        assert getattr(recipe.with_overrides({field.name: written}), field.name) == value
