"""LLM2Vec: attention in both directions, pooling of the text, adapters as published, and the LLM left as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.baselines import llm2vec
from llm2vec_gen_st.baselines.bidirectional import bidirectional_states
from llm2vec_gen_st.baselines.llm2vec import attention_dropout, published_adapters
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.testing import saved_base, tiny_backbone

from .families import TEXTS, family, states_by_hand

INSTRUCTION = "Generate a passage that answers this question: "


def attention_by_hand(backbone: Backbone, ids: list[int]) -> torch.Tensor:
    """Last hidden states (T, H) of a small Llama, layer by layer, with a softmax over *all* positions."""
    model: Any = backbone.llm.base_model
    config = model.config
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    with torch.no_grad():
        hidden = model.embed_tokens(torch.tensor([ids]))
        cos, sin = model.rotary_emb(hidden, torch.arange(len(ids))[None])

        def rotated(states: torch.Tensor) -> torch.Tensor:
            half = width // 2
            turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
            return states * cos[:, None] + turned * sin[:, None]

        for layer in model.layers:
            normed, attention = layer.input_layernorm(hidden), layer.self_attn
            query = attention.q_proj(normed).view(1, len(ids), heads, width).transpose(1, 2)
            key = attention.k_proj(normed).view(1, len(ids), groups, width).transpose(1, 2)
            value = attention.v_proj(normed).view(1, len(ids), groups, width).transpose(1, 2)
            key, value = (states.repeat_interleave(heads // groups, dim=1) for states in (key, value))
            weights = (rotated(query) @ rotated(key).transpose(2, 3) / width**0.5).softmax(dim=-1)
            mixed = (weights @ value).transpose(1, 2).reshape(1, len(ids), heads * width)
            hidden = hidden + attention.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        found: torch.Tensor = model.norm(hidden)[0]
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_states_are_those_of_attention_without_any_mask(attention: str) -> None:
    backbone = family("llama", attention=attention)
    ids = list(backbone.tokenizer(TEXTS[3])["input_ids"])
    with torch.no_grad():
        found = bidirectional_states(backbone.llm, torch.tensor([ids]), torch.tensor([len(ids)]))[0]
    torch.testing.assert_close(found, attention_by_hand(backbone, ids), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2, windows", "qwen3", "mistral", "gemma3"])
def test_every_token_sees_every_other_and_padding_changes_nothing(name: str, attention: str) -> None:
    backbone = family(name, attention=attention)
    ids = list(backbone.tokenizer(TEXTS[3])["input_ids"])[:20]
    rows = [ids]
    for place in range(len(ids)):
        changed = list(ids)
        changed[place] = (changed[place] + 7) % 320
        rows.append(changed)
    batch, lengths = torch.tensor(rows), torch.full((len(rows),), len(ids))
    with torch.no_grad():
        states = bidirectional_states(backbone.llm, batch, lengths)
        # From the first token to the last and back, across any sliding window.
        moved = (states[1:] - states[0]).abs().amax(dim=-1)
        assert (moved > 1e-6).all(), f"unseen: {(moved <= 1e-6).nonzero().tolist()[:5]}"
        for filler in (0, 5):
            padded = torch.cat([batch[:1], torch.full((1, 9), filler)], dim=1)
            alone = bidirectional_states(backbone.llm, padded, lengths[:1])[:, : len(ids)]
            torch.testing.assert_close(alone, states[:1], atol=2e-5, rtol=1e-4)


def test_the_llm_stays_causal_for_everyone_else() -> None:
    backbone = family("llama")
    ids = list(backbone.tokenizer(TEXTS[1])["input_ids"])
    before = states_by_hand(backbone, ids)
    model = llm2vec(backbone, device="cpu")
    model.encode(TEXTS)
    torch.testing.assert_close(states_by_hand(backbone, ids), before, atol=0, rtol=0)
    torch.testing.assert_close(states_by_hand(backbone, ids[:3]), before[:3], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("prompt", ["", INSTRUCTION])
def test_vector_is_the_mean_over_the_text_without_instruction(prompt: str) -> None:
    backbone = family("llama")
    expected = []
    for text in TEXTS:
        ids = list(backbone.tokenizer(prompt + text)["input_ids"]) or [backbone.tokenizer.eos_token_id]
        places = backbone.tokenizer(prompt + text, return_offsets_mapping=True)["offset_mapping"]
        in_text = [number for number, (_, end) in enumerate(places) if end > len(prompt)] or [len(ids) - 1]
        expected.append(attention_by_hand(backbone, ids)[in_text].mean(dim=0))
    model = llm2vec(backbone, device="cpu")
    for batch_size in (1, 5):
        found = model.encode(TEXTS, prompt=prompt or None, batch_size=batch_size)
        np.testing.assert_allclose(found, torch.stack(expected).numpy(), atol=5e-5)


def test_attention_dropout_is_the_only_noise_and_ends_with_the_block() -> None:
    backbone = family("llama")
    ids, lengths = torch.tensor([[5, 6, 7, 8]]), torch.tensor([4])
    plain = bidirectional_states(backbone.llm, ids, lengths)
    with attention_dropout(backbone.llm, 0.5):
        first, second = (bidirectional_states(backbone.llm, ids, lengths) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(bidirectional_states(backbone.llm, ids, lengths), plain)
    assert not any(module.training for module in backbone.llm.modules())
    with (
        pytest.raises(ValueError, match="no attention dropout"),
        attention_dropout(tiny_backbone(_gpt2()).llm, 0.5),
    ):
        pass


def _gpt2() -> GPT2Config:
    return GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=2)


def test_an_attention_that_takes_no_ready_mask_is_refused() -> None:
    backbone = tiny_backbone()
    backbone.llm.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        llm2vec(backbone)


# Published adapters


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_base(tmp_path_factory.mktemp("base"), family("llama"))


def _adapter(folder: Path, base: Path, seed: int, *, headless: bool, **options: Any) -> Path:
    """A PEFT folder as the authors' scripts write them, with matrices far from zero."""
    model: Any = (AutoModel if headless else AutoModelForCausalLM).from_pretrained(base)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    wrapped = get_peft_model(model, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    wrapped.save_pretrained(folder)
    (folder / "llm2vec_config.json").write_text(json.dumps({"pooling_mode": "mean", "skip_instruction": True}))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return (
        _adapter(folder / "Tiny-mntp", base_folder, 1, headless=True),
        _adapter(
            folder / "Tiny-mntp-unsup-simcse", base_folder, 2, headless=True, r=3, lora_alpha=3,
            target_modules=["q_proj", "k_proj"],
        ),
    )  # fmt: skip


def _merged(base: Path, *folders: Path) -> Backbone:
    """The base model with each adapter merged into its weights in turn, read tensor by tensor."""
    backbone = load_backbone(str(base))
    weights = dict(backbone.llm.base_model.named_parameters())
    for folder in folders:
        config = json.loads((folder / "adapter_config.json").read_text())
        found = load_file(folder / "adapter_model.safetensors")
        for key in [key for key in found if ".lora_A." in key]:
            layer = key.removeprefix("base_model.model.").removeprefix("model.").removesuffix(".lora_A.weight")
            change = found[key.replace("lora_A", "lora_B")] @ found[key] * (config["lora_alpha"] / config["r"])
            weights[f"{layer}.weight"].data += change
    return backbone


def test_second_adapter_stands_on_the_first_one_merged(adapters: tuple[Path, Path], base_folder: Path) -> None:
    expected = llm2vec(_merged(base_folder, *adapters), device="cpu").encode(TEXTS)
    found = llm2vec(adapters[1], device="cpu")
    np.testing.assert_allclose(found.encode(TEXTS), expected, atol=5e-5)
    for fewer in ((), adapters[:1]):
        other = llm2vec(_merged(base_folder, *fewer), device="cpu").encode(TEXTS)
        assert np.abs(found.encode(TEXTS) - other).max() > 1e-2


def test_adapters_can_be_named_one_by_one_and_put_on_a_loaded_base(
    adapters: tuple[Path, Path], base_folder: Path
) -> None:
    expected = llm2vec(adapters[1], device="cpu").encode(TEXTS)
    backbone = load_backbone(str(base_folder))
    plain = states_by_hand(backbone, [5, 6, 7])
    shared = llm2vec(backbone, adapters=adapters, device="cpu")
    np.testing.assert_allclose(shared.encode(TEXTS), expected, atol=1e-6)
    torch.testing.assert_close(states_by_hand(backbone, [5, 6, 7]), plain, atol=0, rtol=0)
    np.testing.assert_allclose(
        llm2vec(base_folder, adapters=list(adapters), device="cpu").encode(TEXTS), expected, atol=1e-6
    )


def test_adapter_of_a_whole_causal_lm_and_rank_stabilized_scaling_are_read(tmp_path: Path, base_folder: Path) -> None:
    folder = _adapter(tmp_path / "Tiny-mntp", base_folder, 3, headless=False, use_rslora=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    expected = _merged(base_folder)
    for key, matrix in load_file(folder / "adapter_model.safetensors").items():
        if ".lora_A." in key:
            up = load_file(folder / "adapter_model.safetensors")[key.replace("lora_A", "lora_B")]
            name = key.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")
            weight = expected.llm.base_model.get_submodule(name).weight
            weight.data += up @ matrix * config["lora_alpha"] / config["r"] ** 0.5
    np.testing.assert_allclose(
        llm2vec(folder, device="cpu").encode(TEXTS), llm2vec(expected, device="cpu").encode(TEXTS), atol=5e-5
    )


def test_names_of_published_adapters_name_their_stages(tmp_path: Path) -> None:
    both = ["McGill-NLP/LLM2Vec-Qwen3-06B-mntp", "McGill-NLP/LLM2Vec-Qwen3-06B-mntp-unsup-simcse"]
    assert published_adapters(both[1]) == both
    assert published_adapters(both[0]) == both[:1]
    assert published_adapters("meta-llama/Llama-3.2-1B-Instruct") == []
    alone = tmp_path / "Tiny-mntp-unsup-simcse"
    alone.mkdir()
    (alone / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="Tiny-mntp, which is not beside it"):
        published_adapters(str(alone))


def test_adapters_that_cannot_be_read_exactly_are_refused_by_name(tmp_path: Path, base_folder: Path) -> None:
    folder = _adapter(tmp_path / "a-mntp", base_folder, 1, headless=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "not LORA"),
        ({"r": 5}, "but r is 5"),
        ({"base_model_name_or_path": None}, "names no base model"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            llm2vec(folder)
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)
    tensors["base_model.model.layers.9.self_attn.q_proj.lora_B.weight"] = torch.zeros(64, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.9\.self_attn"):
        llm2vec(folder)
    # A shared backbone is left without LoRA layers, and takes another adapter.
    backbone = load_backbone(str(base_folder))
    with pytest.raises(CheckpointError):
        llm2vec(backbone, adapters=[folder])
    llm2vec(backbone, adapters=[_adapter(tmp_path / "b", base_folder, 1, headless=True)])


def test_an_adapter_that_is_nowhere_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"LLM2Vec-Qwen3-06B-mntp'"):
        llm2vec("McGill-NLP/LLM2Vec-Qwen3-06B-mntp-unsup-simcse")


def test_an_encoder_with_adapters_is_a_teacher(adapters: tuple[Path, Path]) -> None:
    model = llm2vec(adapters[1], device="cpu")
    found = teacher_embeddings(TEXTS[:2], model, progress=False)
    np.testing.assert_allclose(found, model.encode_document(TEXTS[:2]), atol=1e-6)
