"""For every family of LLMs the vector is what its definition says, computed here by hand from one unbatched pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.losses.cross_entropy import check_lm_logits, lm_logits
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=16, final_logit_softcapping=0.5
    ),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=16),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=16),
    "mistral, wide window": lambda: MistralConfig(**SMALL, sliding_window=400),
    "gpt2": lambda: GPT2Config(
        vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=1024, bos_token_id=None, eos_token_id=2
    ),
    "qwen3, experts": lambda: Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "gpt-oss, experts": lambda: GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}
TEXTS = [
    "bees",
    "Where do polar bears live? Who makes honey?",
    "",
    "Rivers carry water from the mountains to the sea, and bees make honey from the nectar of flowers.",
    "sea ice",
]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest) -> LLM2VecGen:
    student = tiny_model(backbone=tiny_backbone(FAMILIES[request.param]()))
    # Weights far from zero, so that windows, caps and scalings make a difference that can be seen.
    with torch.no_grad():
        for parameter in student.llm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return student


def _hidden_by_hand(model: LLM2VecGen, text: str) -> torch.Tensor:
    """Last hidden states (n, H) of the compression tokens: text ids and suffix in one unbatched forward."""
    ids = torch.tensor([model.tokenizer(text)["input_ids"]], dtype=torch.long)
    rows = torch.cat([model.llm.get_input_embeddings()(ids), model.suffix_transformer.suffix[None]], dim=1)
    # The input of the LM head, whatever the family does before it: the states after the final norm.
    caught: list[torch.Tensor] = []
    hook = model.llm.get_output_embeddings().register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    model.llm(inputs_embeds=rows, attention_mask=torch.ones(rows.shape[:2]), use_cache=False)
    hook.remove()
    return caught[0][0, -4:]


def _vector_by_hand(model: LLM2VecGen, text: str) -> torch.Tensor:
    recon, align = model.response_head.mlp_recon, model.response_head.mlp_align
    rows = [align.weight @ (recon.weight @ state + recon.bias) + align.bias for state in _hidden_by_hand(model, text)]
    return sum(rows) / len(rows)


def test_vector_is_the_one_computed_by_hand(model: LLM2VecGen) -> None:
    with torch.no_grad():
        expected = torch.stack([_vector_by_hand(model, text) for text in TEXTS]).numpy()
    for batch_size in (1, 5):
        np.testing.assert_allclose(model.encode(TEXTS, batch_size=batch_size), expected, atol=2e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2


def test_soft_prompts_are_those_computed_by_hand_and_decode_greedily(model: LLM2VecGen) -> None:
    recon = model.response_head.mlp_recon
    with torch.no_grad():
        expected = torch.stack([_hidden_by_hand(model, text) @ recon.weight.T + recon.bias for text in TEXTS])
    torch.testing.assert_close(model.encode_soft_prompts(TEXTS), expected, atol=2e-5, rtol=0)
    written = []
    for prompt in expected:
        rows, ids = prompt[None], []
        for _ in range(6):
            with torch.no_grad():
                logits = model.llm(inputs_embeds=rows, use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
            if ids[-1] == model.tokenizer.eos_token_id:
                break
            rows = torch.cat([rows, model.llm.get_input_embeddings()(torch.tensor([ids[-1:]]))], dim=1)
        written.append(model.tokenizer.decode(ids, skip_special_tokens=True))
    assert model.decode(expected, max_new_tokens=6) == written
    assert any(written)


def test_shared_start_is_run_once_and_changes_nothing(model: LLM2VecGen) -> None:
    """An instruction that all texts of a batch share, up to texts that are nothing else."""
    instruction = "Rivers carry water from the mountains to the sea, and ice melts: "
    texts = [instruction + text for text in ("", *TEXTS, TEXTS[0])]
    with torch.no_grad():
        expected = torch.stack([_vector_by_hand(model, text) for text in texts]).numpy()
    widths: list[int] = []
    hook = model.llm.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.extend(
            kwargs[name].shape[0] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None
        ),
        with_kwargs=True,
    )
    found = model.encode(texts, batch_size=len(texts))
    hook.remove()
    np.testing.assert_allclose(found, expected, atol=2e-5)
    if model.suffix_transformer.attends_to_everything(len(instruction) + 20):
        assert 1 in widths
        assert max(widths) > 1


def test_groups_of_a_batch_share_one_run_of_their_start(model: LLM2VecGen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are run in several groups go on behind the same tokens, which pass through the LLM once."""
    instruction = "Rivers carry water from the mountains to the sea, and ice melts: "
    texts = [instruction + text * (1 + number) for number, text in enumerate(TEXTS)]
    monkeypatch.setattr("llm2vec_gen_st.modules.groups._TOKENS_AT_ONCE_CPU", 1)
    expected = np.concatenate([model.encode([text]) for text in texts])
    starts: list[int] = []
    hook = model.llm.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: starts.extend([1] if kwargs.get("input_ids") is not None else []), with_kwargs=True
    )
    found = model.encode(texts, batch_size=len(texts))
    hook.remove()
    np.testing.assert_allclose(found, expected, atol=2e-5)
    if model.suffix_transformer.attends_to_everything(256):
        assert len(starts) == 1


def test_training_pass_equals_inference_pass_in_value_and_gradient(model: LLM2VecGen) -> None:
    suffix, probe = (
        model.suffix_transformer.suffix,
        torch.randn(len(TEXTS), 4, 64, generator=torch.Generator().manual_seed(1)),
    )
    features = model.preprocess(TEXTS)
    with torch.no_grad():
        inferred = model.suffix_transformer(dict(features))["compression_states"]
    trained = model.suffix_transformer(dict(features))["compression_states"]
    assert trained.requires_grad
    torch.testing.assert_close(trained, inferred, atol=2e-5, rtol=0)
    (found,) = torch.autograd.grad((trained * probe).sum(), suffix)
    whole = torch.stack([_hidden_by_hand(model, text) for text in TEXTS])
    (expected,) = torch.autograd.grad((whole * probe).sum(), suffix)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)


def test_text_runs_without_gradient_where_every_layer_sees_all_of_it(model: LLM2VecGen) -> None:
    """The cheap training pass is taken, but not where a sliding window would count padding inside the cache."""
    features = model.preprocess(TEXTS)
    widths: list[tuple[int, bool]] = []
    hook = model.llm.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(
            ((kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]).shape[1],
             torch.is_grad_enabled())
        ),
        with_kwargs=True,
    )  # fmt: skip
    model.suffix_transformer(dict(features))
    hook.remove()
    text = features["input_ids"].shape[1]
    narrow = getattr(model.llm.config, "sliding_window", None) == 16
    if narrow:
        assert all(gradient for _, gradient in widths)
        assert max(widths) == (text + 8, True)
    else:
        of_text, of_suffix = widths[0::2], widths[1::2]
        assert not any(gradient for _, gradient in of_text)
        assert max(of_text) == (text, False)
        assert set(of_suffix) == {(8, True)}
        assert len(of_suffix) == len(of_text)


def test_chunked_head_gives_the_logits_of_the_llm(model: LLM2VecGen) -> None:
    ids = torch.tensor([model.tokenizer(TEXTS[3])["input_ids"]])
    with torch.no_grad():
        expected = model.llm(input_ids=ids, use_cache=False).logits
        hidden = model.llm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = lm_logits(model.llm, hidden)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    cap = getattr(model.llm.config, "final_logit_softcapping", None)
    if cap is not None:
        assert expected.abs().max() <= cap
        assert (model.llm.get_output_embeddings()(hidden)).abs().max() > 2 * cap
    check_lm_logits(model.llm)


def test_unknown_scaling_after_the_head_is_refused(fresh_student: LLM2VecGen) -> None:
    llm = fresh_student.llm
    with torch.no_grad():
        llm.get_output_embeddings().weight.mul_(10)
    inner = llm.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits = functional.softplus(output.logits)
        return output

    llm.forward = scaled
    with pytest.raises(ValueError, match="recon_weight=0"):
        check_lm_logits(llm)
