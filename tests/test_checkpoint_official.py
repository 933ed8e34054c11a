"""The authors' checkpoints are read exactly, and written so that their package reads them."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2Config

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import load_backbone
from llm2vec_gen_st.base_reference import BaseModelError
from llm2vec_gen_st.checkpoints import export_official, import_official
from llm2vec_gen_st.interpret.decode import decode_ids
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.modules.lora import lora_enabled, lora_parameters
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.testing import saved_base, tiny_backbone, tiny_model

from .large_heads import with_large_heads

PARITY = Path(__file__).parent / "fixtures" / "parity"
CASES = [
    ("qwen3", "official", "expected"),
    ("llama", "official", "expected"),
    ("qwen3", "official-lora", "expected-lora"),
]
# The authors' code turns special tokens that a text spells into these tokens; here they stay text.
SPELL_SPECIAL_TOKENS = {"literal_question1", "literal_N_then_long", "chat_tokens"}

Edit = Callable[[Callable[[Path], None]], Path]


def load(family: str, variant: str) -> LLM2VecGen:
    return import_official(PARITY / family / variant, device="cpu")


@cache
def expected(family: str, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = PARITY / family
    return json.loads((folder / f"{name}.json").read_text("utf-8")), load_file(folder / f"{name}.safetensors")


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def case(request: pytest.FixtureRequest) -> tuple[LLM2VecGen, dict[str, Any], dict[str, torch.Tensor]]:
    family, variant, name = request.param
    return load(family, variant), *expected(family, name)


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """A copy of the qwen3 checkpoint, beside its base, after an edit."""

    def make(edit: Callable[[Path], None]) -> Path:
        shutil.copytree(PARITY / "qwen3" / "base", tmp_path / "base")
        shutil.copytree(PARITY / "qwen3" / "official", tmp_path / "official")
        edit(tmp_path / "official")
        return tmp_path / "official"

    return make


@pytest.mark.parametrize("limit", [512, 48])
def test_embeddings_and_soft_prompts_are_the_authors(case: Any, limit: int) -> None:
    model, facts, tensors = case
    model.max_seq_length = limit
    names, texts = list(facts["texts"]), list(facts["texts"].values())
    embeddings = model.encode(texts, convert_to_tensor=True)
    prompts = model.encode_soft_prompts(texts)
    for row, name in enumerate(names):
        ids = facts["single_input_ids"][f"ml{limit}"][name]
        suffix = facts["meta"]["special_token_ids"]
        found = torch.tensor(model.preview(texts[row]).token_ids)
        for kind in ("single", "batch"):
            distance = float((embeddings[row] - tensors[f"ml{limit}.{kind}.embeddings"][row]).abs().max())
            if name in SPELL_SPECIAL_TOKENS:
                assert distance > 1e-3, name
                continue
            assert found.tolist() == ids[: -len(suffix)], name
            assert ids[-len(suffix) :] == suffix
            assert distance < 2e-5, (name, kind)
            difference = prompts[row] - tensors[f"ml{limit}.{kind}.recon_hidden_states"][row]
            assert float(difference.abs().max()) < 1e-4, (name, kind)
        special = set(model.backbone.tokenizer.all_special_ids) | set(suffix)
        special -= {model.backbone.tokenizer.bos_token_id}
        if name in SPELL_SPECIAL_TOKENS:
            assert not special & set(found.tolist()), name
    model.max_seq_length = 512


def test_greedy_decoding_is_the_authors(case: Any) -> None:
    model, facts, tensors = case
    transformer = model.suffix_transformer
    with lora_enabled(model.llm, False):
        found = decode_ids(
            model.backbone,
            tensors["ml512.single.recon_hidden_states"],
            max_new_tokens=facts["generate_max_new_tokens"],
            end_ids=transformer.end_of_text_ids,
        )
    for (name, generation), ids in zip(facts["generation"].items(), found, strict=True):
        assert ids == generation["ids"], name
    texts = {name: text for name, text in facts["texts"].items() if name not in SPELL_SPECIAL_TOKENS}
    decoded = model.decode(list(texts.values()), max_new_tokens=facts["generate_max_new_tokens"])
    for name, text in zip(texts, decoded, strict=True):
        assert text == facts["generation"][name]["text"].partition("<|end_of_text|>")[0], name


def losses_of(
    model: LLM2VecGen, facts: dict[str, Any], teacher: torch.Tensor, **weights: float
) -> dict[str, torch.Tensor]:
    examples = facts["train_examples"]
    query = model.suffix_transformer.preprocess([example["question"].strip() for example in examples])
    answers = [example["answer"].strip() for example in examples]
    response = pad_right(model.suffix_transformer.response_ids(answers, 512))
    return LLM2VecGenLoss(model, **weights)([query, response], teacher)


def gradients(model: LLM2VecGen) -> dict[str, torch.Tensor]:
    head = model.response_head
    parameters = {"suffix": model.suffix_transformer.suffix, **lora_parameters(model.llm)}
    for name, layer in (("reconstruction_mlp", head.mlp_recon), ("alignment_mlp", head.mlp_align)):
        assert layer is not None
        parameters |= {f"{name}.{key}": value for key, value in layer.named_parameters()}
    return {key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in parameters.items()}


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("total", {}),
        ("reconstruction", {"align_weight": 0.0}),
        ("alignment", {"recon_weight": 0.0}),
        ("weighted_0.5_2.0", {"recon_weight": 0.5, "align_weight": 2.0}),
    ],
)
def test_losses_and_gradients_are_the_authors(case: Any, name: str, weights: dict[str, float]) -> None:
    model, facts, tensors = case
    model.zero_grad()
    losses = losses_of(model, facts, tensors["train.teacher_embeddings"], **weights)
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    assert total.item() == pytest.approx(facts["losses"][name], abs=1e-5)
    if name == "total":
        assert losses["reconstruction"].item() == pytest.approx(facts["losses"]["reconstruction"], abs=1e-5)
        assert losses["alignment"].item() == pytest.approx(facts["losses"]["alignment"], abs=1e-5)
    found = gradients(model)
    norms = {
        "special_token_rows": norm([found["suffix"]]),
        "reconstruction_mlp": norm([found[f"reconstruction_mlp.{key}"] for key in ("weight", "bias")]),
        "alignment_mlp": norm([found[f"alignment_mlp.{key}"] for key in ("weight", "bias")]),
    }
    if model.suffix_transformer.lora:
        norms["lora"] = norm([value for key, value in found.items() if "lora_" in key])
    assert norms == pytest.approx(facts["grad_l2_norms"][name], rel=1e-4)
    model.zero_grad()


def test_every_gradient_is_the_authors(case: Any) -> None:
    model, facts, tensors = case
    model.zero_grad()
    torch.stack(list(losses_of(model, facts, tensors["train.teacher_embeddings"]).values())).sum().backward()
    found = gradients(model)
    stored = {key.removeprefix("train.grad.total."): value for key, value in tensors.items() if "train.grad." in key}
    compared = 0
    for key, value in stored.items():
        if key.endswith("trainable_tokens_delta.default"):
            own = found["suffix"]
        elif "lora_" in key:
            own = found[re.sub(r"\.default\.weight$", "", key.removeprefix("encoder_model.base_model.model."))]
        else:
            own = found[key.replace(".projection", "")]
        assert float((own - value).abs().max()) < 1e-5, key
        compared += 1
    assert compared == len(found)
    assert all(parameter.grad is None for parameter in model.llm.parameters() if not parameter.requires_grad)
    model.zero_grad()


def test_end_ids_and_end_marker(case: Any) -> None:
    model, _, _ = case
    assert model.suffix_transformer.end_of_response == "<|end_of_text|>"
    assert model.suffix_transformer.end_of_text_ids == [599]


def test_lora_acts_in_the_student_pass_only() -> None:
    model = load("qwen3", "official-lora")
    plain = load("qwen3", "official")
    ids = {"input_ids": torch.tensor([[5, 6, 7]])}
    assert torch.equal(model.llm(**ids).logits, plain.llm(**ids).logits)
    with lora_enabled(model.llm, True):
        assert not torch.equal(model.llm(**ids).logits, plain.llm(**ids).logits)
    assert all(parameter.requires_grad for parameter in lora_parameters(model.llm).values())
    with pytest.raises(ValueError, match="already carries the LoRA layers"):
        import_official(PARITY / "qwen3" / "official-lora", backbone=model.backbone)


def test_heads_saved_on_a_gpu_are_read_without_one(edited: Edit) -> None:
    def edit(folder: Path) -> None:
        for name in ("reconstruction_mlp", "alignment_mlp"):
            shutil.copy(PARITY / "qwen3" / "heads-saved-on-cuda" / name, folder / name)

    found = import_official(edited(edit)).response_head.state_dict()
    for name, value in load("qwen3", "official").response_head.state_dict().items():
        assert torch.equal(found[name], value)


class _Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_malicious_head_is_refused_and_runs_nothing(edited: Edit, tmp_path: Path, form: str) -> None:
    trace = tmp_path / "executed"

    def edit(folder: Path) -> None:
        content = {"state_dict": _Malicious(trace)}
        if form == "torch":
            torch.save(content, folder / "alignment_mlp")
        else:
            (folder / "alignment_mlp").write_bytes(pickle.dumps(content, protocol=2))

    with pytest.raises(CheckpointError, match="alignment_mlp was refused"):
        import_official(edited(edit))
    assert not trace.exists()


def test_trainer_leftovers_are_never_opened(edited: Edit) -> None:
    def edit(folder: Path) -> None:
        for name in ("training_args.bin", "optimizer.pt", "rng_state.pth"):
            (folder / name).write_bytes(b"not a pickle")

    assert import_official(edited(edit)).encode(["a"]).shape == (1, 48)


@pytest.mark.parametrize("missing", ["reconstruction_mlp", "alignment_mlp"])
def test_a_missing_head_skips_its_stage(edited: Edit, missing: str) -> None:
    model = import_official(edited(lambda folder: (folder / missing).unlink()))
    tensors = expected("qwen3", "expected")[1]
    states = tensors["ml512.single.encoder_hidden_states"][0]
    found = torch.from_numpy(model.encode(expected("qwen3", "expected")[0]["texts"]["short"]))
    if missing == "alignment_mlp":
        wanted = tensors["ml512.single.recon_hidden_states"][0].mean(0)
    else:
        layer = load("qwen3", "official").response_head.mlp_align
        assert layer is not None
        wanted = layer(states).mean(0).detach()
    assert float((found - wanted).abs().max()) < 2e-5
    assert model.get_embedding_dimension() == len(wanted)


def test_run_config_is_read_as_it_is_written(edited: Edit) -> None:
    def edit(folder: Path) -> None:
        path = folder / "run_config.yml"
        text = path.read_text("utf-8").replace("model_name_or_path: ../base", "model_name_or_path: ../other", 1)
        text += "wandb_run_notes: broken: as YAML: [\ntorch_dtype: None\nencoding_mode: last_3_tokens\n"
        path.write_text(text + "\nmodel_name_or_path: ../base\nencoding_mode: last_5_tokens\n", "utf-8")
        (folder / "encoder_decoder_config.json").write_text('{"save_decoder": false}', "utf-8")

    transformer = import_official(edited(edit)).suffix_transformer
    assert (transformer.thought_tokens, transformer.compression_tokens) == (15, 5)
    assert Path(transformer.base.id).name == "base"
    assert Path(transformer.base.id).is_absolute()


def test_encoding_mode_of_the_json_file_wins_and_ten_is_the_default(edited: Edit, tmp_path: Path) -> None:
    def edit(folder: Path) -> None:
        path = folder / "run_config.yml"
        path.write_text(path.read_text("utf-8").replace("encoding_mode: last_10_", "encoding_mode: last_3_"))

    folder = edited(edit)
    assert import_official(folder).suffix_transformer.compression_tokens == 10
    (folder / "encoder_decoder_config.json").unlink()
    assert import_official(folder).suffix_transformer.compression_tokens == 3
    run = folder / "run_config.yml"
    run.write_text(run.read_text("utf-8").replace("encoding_mode: last_3_tokens\n", ""))
    assert import_official(folder).suffix_transformer.compression_tokens == 10
    # The training script leaves the file one level above.
    shutil.move(run, tmp_path / "run_config.yml")
    (tmp_path / "run_config.yml").write_text(f"model_name_or_path: {tmp_path / 'base'}\nencoding_mode: last_2_tokens\n")
    assert import_official(folder).suffix_transformer.compression_tokens == 2


def change_adapter(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "encoder" / "adapter_model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return change


ROWS = "base_model.model.embed_tokens.trainable_tokens_delta"
RESIZED = "base_model.model.embed_tokens.base_layer.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(ROWS), f"{ROWS}' is missing"),
        (lambda tensors: tensors.update({ROWS: tensors[ROWS][:-1]}), f"{ROWS}' has shape \\(19, 64\\)"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "'extra' is not known"),
        (lambda tensors: tensors.update({"embed.rows": tensors.pop(ROWS)}), "'embed.rows' is not known"),
    ],
)
def test_wrong_adapter_tensors_are_named(edited: Edit, edit: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        import_official(edited(change_adapter(edit)))
    assert "adapter_model.safetensors" in str(error.value)


def test_wrong_head_tensors_are_named(edited: Edit) -> None:
    folder = edited(lambda _: None)
    weight, bias = torch.zeros(48, 64), torch.zeros(48)
    for state, message in (
        ({"projection.weight": weight}, "'projection.bias' is missing"),
        ({"projection.weight": weight, "projection.bias": bias, "more": bias}, "'more' is not known"),
        ({"projection.weight": weight[:, :5], "projection.bias": bias}, "'projection.weight' has shape"),
    ):
        torch.save({"state_dict": state, "config": {}}, folder / "alignment_mlp")
        with pytest.raises(CheckpointError, match=message):
            import_official(folder)


def test_another_base_model_is_refused(edited: Edit) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[RESIZED][7] += 0.01

    folder = edited(change_adapter(edit))
    with pytest.raises(BaseModelError, match=r"row 7 of .* \(embed_tokens.base_layer.weight\) differs"):
        import_official(folder)
    assert import_official(folder, verify_base=False).encode(["a"]).shape == (1, 48)


def test_heads_that_undo_each_other_survive_an_export_beside_a_bfloat16_llm(tmp_path: Path) -> None:
    model = with_large_heads(tiny_model())
    model.llm.bfloat16()
    expected = model.encode(["bees", "rivers"])
    export_official(model, tmp_path)
    found = LLM2VecGen(str(tmp_path), backbone=model.backbone, device="cpu").encode(["bees", "rivers"])
    cosines = (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert (cosines > 0.999).all(), cosines


def test_base_rows_may_have_been_rounded(edited: Edit) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[RESIZED] = tensors[RESIZED].bfloat16()

    folder = edited(change_adapter(edit))
    import_official(folder)
    import_official(folder, model_kwargs={"dtype": torch.bfloat16})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"token_indices": None}, "expected a list of the suffix tokens' ids"),
        ({"token_indices": [600, 600]}, "not distinct"),
        ({"peft_type": "LORA", "use_dora": True}, "use_dora"),
        ({"peft_type": "LORA", "target_modules": "all-linear"}, "target_modules must be a list"),
    ],
)
def test_adapters_that_cannot_be_read_exactly_are_refused(edited: Edit, changes: dict[str, Any], message: str) -> None:
    def edit(folder: Path) -> None:
        path = folder / "encoder" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))

    with pytest.raises(CheckpointError, match=message):
        import_official(edited(edit))


def test_other_directories_are_refused(edited: Edit, tmp_path: Path) -> None:
    tiny_model().save_pretrained(str(tmp_path / "ours"))
    with pytest.raises(CheckpointError, match="one of our own checkpoints"):
        import_official(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        import_official(PARITY / "qwen3" / "base")

    def edit(folder: Path) -> None:
        (folder / "encoder_decoder_config.json").write_text('{"encoding_mode": "last_21_tokens"}')

    with pytest.raises(CheckpointError, match="encoding_mode 'last_21_tokens'"):
        import_official(edited(edit))


def test_loads_by_the_class_and_saves_in_our_form(tmp_path: Path) -> None:
    model = LLM2VecGen(str(PARITY / "qwen3" / "official-lora"), device="cpu")
    model.save_pretrained(str(tmp_path))
    again = LLM2VecGen(str(tmp_path), device="cpu")
    texts = ["where do polar bears live?", ""]
    np.testing.assert_allclose(again.encode(texts), model.encode(texts), atol=1e-6)
    assert again.suffix_transformer.end_of_text_ids == [599]
    assert again.decode(texts, max_new_tokens=8) == model.decode(texts, max_new_tokens=8)


def untied_qwen2() -> Any:
    config = Qwen2Config(
        vocab_size=328,  # padded, but by fewer rows than the suffix needs
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return tiny_backbone(config)


def students() -> dict[str, Callable[[], LLM2VecGen]]:
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": ["q_proj", "up_proj"]}
    return {
        "llama": tiny_model,
        "qwen2-untied": lambda: tiny_model(backbone=untied_qwen2()),
        "two-tokens": lambda: LLM2VecGen.from_base(
            untied_qwen2(), thought_tokens=1, compression_tokens=1, embedding_dim=24, device="cpu"
        ),
        "lora": lambda: LLM2VecGen.from_base(
            tiny_backbone(), embedding_dim=48, device="cpu", lora=lora, max_seq_length=64
        ),
    }


@pytest.mark.parametrize("kind", list(students()))
def test_exported_checkpoint_is_read_back_the_same(tmp_path: Path, kind: str) -> None:
    model = students()[kind]()
    for parameter in lora_parameters(model.llm).values():
        torch.nn.init.normal_(parameter, std=0.1)
    before = model.backbone.tokenizer.backend_tokenizer.to_str()
    folder = export_official(model, tmp_path / "official")
    assert model.backbone.tokenizer.backend_tokenizer.to_str() == before

    # A backbone of its own, so that LoRA layers are put into one that has none.
    fresh = students()[kind]().backbone if kind != "lora" else tiny_backbone()
    again = import_official(folder, backbone=fresh, device="cpu")
    own, other = model.suffix_transformer, again.suffix_transformer
    assert (other.thought_tokens, other.compression_tokens) == (own.thought_tokens, own.compression_tokens)
    assert (other.max_seq_length, other.lora) == (own.max_seq_length, own.lora)
    assert torch.equal(own.suffix, other.suffix)
    for name, value in model.response_head.state_dict().items():
        assert torch.equal(again.response_head.state_dict()[name], value)
    for name, value in lora_parameters(model.llm).items():
        assert torch.equal(lora_parameters(again.llm)[name], value)
    texts = ["where do polar bears live?", "", "rivers " * 300, "<question1><|im_end|>"]
    assert np.array_equal(model.encode(texts), again.encode(texts))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = json.loads((folder / "special_tokens_map.json").read_text("utf-8"))["additional_special_tokens"]
    ids = json.loads((folder / "encoder" / "config.json").read_text("utf-8"))["special_tokens_ids"]
    assert tokenizer.convert_tokens_to_ids(names) == ids
    assert tokenizer("a" + "".join(names))["input_ids"][-len(ids) :] == ids
    assert tokenizer.padding_side == "left"


def test_export_of_an_imported_checkpoint_keeps_the_authors_files(tmp_path: Path) -> None:
    source = PARITY / "llama" / "official"
    folder = export_official(load("llama", "official"), tmp_path)
    for name in ("encoder/config.json", "tokenizer_config.json"):
        found, wanted = (json.loads((place / name).read_text("utf-8")) for place in (folder, source))
        for key in ("special_tokens_ids", "vocab_size", "num_tokens", "eos_token_id", "pad_token_id", "bos_token_id"):
            assert found.get(key) == wanted.get(key), key
        for key in ("rope_theta", "rope_scaling", "pad_token", "added_tokens_decoder"):
            assert found.get(key) == wanted.get(key), key
    assert torch.equal(
        load_file(folder / "encoder" / "adapter_model.safetensors")[ROWS],
        load_file(source / "encoder" / "adapter_model.safetensors")[ROWS],
    )


def test_a_student_with_further_modules_is_not_exported(tmp_path: Path) -> None:
    model = LLM2VecGen.from_base(tiny_backbone(), embedding_dim=8, normalize=True, device="cpu")
    model.append(torch.nn.Identity())
    with pytest.raises(ValueError, match=r"further modules: Identity$"):
        export_official(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_instructions_that_the_format_has_no_place_for_are_warned_about(tmp_path: Path) -> None:
    base = load_backbone(str(saved_base(tmp_path / "base")))
    model = LLM2VecGen.from_base(base, embedding_dim=8, prompts={"query": "ask: "}, device="cpu")
    with pytest.warns(UserWarning, match="no place for instructions"):
        export_official(model, tmp_path / "own")
    usual = LLM2VecGen.from_base(base, embedding_dim=8, device="cpu")
    with warnings.catch_warnings(action="error"):
        export_official(usual, tmp_path / "usual")
    usual.default_prompt_name = "query"
    with pytest.warns(UserWarning, match="none is its default"):
        export_official(usual, tmp_path / "usual")


def test_a_normalized_student_keeps_its_directions_and_says_so(tmp_path: Path) -> None:
    base = load_backbone(str(saved_base(tmp_path / "base")))
    model = LLM2VecGen.from_base(base, embedding_dim=8, normalize=True, device="cpu")
    with pytest.warns(UserWarning, match="the same cosines, but other lengths"):
        export_official(model, tmp_path / "official")
    found = LLM2VecGen(str(tmp_path / "official"), device="cpu")
    vectors, unit = found.encode(["who makes honey?", ""]), model.encode(["who makes honey?", ""])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert (abs(lengths - 1) > 0.01).all()
    np.testing.assert_allclose(vectors / lengths, unit, atol=1e-6)
