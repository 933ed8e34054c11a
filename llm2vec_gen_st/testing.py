"""A tiny random student that needs no download: for examples, for tests, and for trying code out."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from llm2vec_gen_st.backbone import Backbone, load_backbone
from llm2vec_gen_st.base_reference import BaseReference
from llm2vec_gen_st.model import LLM2VecGen

_CORPUS = (
    "Polar bears live on sea ice in the Arctic and hunt seals.",
    "Bees make honey and wax from the nectar of flowers.",
    "Rivers carry water from the mountains to the sea.",
    "Where do polar bears live? Who makes honey? What is a river?",
    "def add(a, b):\n    return a + b\n",
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 320 tokens, trained on five sentences; it reads any text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(_SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0], extra_special_tokens=[_SPECIAL[1]]
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def tiny_backbone(config: PretrainedConfig | None = None, *, seed: int = 0) -> Backbone:
    """A random causal LM of two layers and width 64.

    Args:
        config: Any causal LM's config; a small Llama by default.
        seed: Seed of the weights.

    Returns:
        The backbone, frozen.

    Example:
        >>> tiny_backbone().hidden_size
        64
    """
    tokenizer = tiny_tokenizer()
    if config is None:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        llm = AutoModelForCausalLM.from_config(config)
    llm.requires_grad_(False).eval()
    return Backbone(llm, tokenizer, BaseReference.of(llm, "tiny"))


def tiny_model(*, seed: int = 0, backbone: Backbone | None = None) -> LLM2VecGen:
    """A random student: 4 thought and 4 compression tokens, embeddings of width 48.

    Args:
        seed: Seed of all weights.
        backbone: Another backbone to put it on.

    Returns:
        The student, on the CPU.
    """
    return LLM2VecGen.from_base(
        backbone or tiny_backbone(seed=seed),
        thought_tokens=4,
        compression_tokens=4,
        embedding_dim=48,
        seed=seed,
        device="cpu",
    )


def saved_base(folder: str | Path, backbone: Backbone | None = None) -> Path:
    """A base model as a directory that ``load_backbone`` and the command line take.

    Args:
        folder: Where it goes.
        backbone: Another one than the tiny one.

    Returns:
        The folder.

    Example:
        >>> import tempfile
        >>> load_backbone(str(saved_base(tempfile.mkdtemp()))).hidden_size
        64
    """
    backbone = backbone or tiny_backbone()
    backbone.llm.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    return Path(folder)


def saved_model(folder: str | Path, base: str | Path | None = None, *, seed: int = 0) -> Path:
    """A tiny student as a directory, on a base model that is one too.

    Args:
        folder: Where it goes; the base, if none is given, goes beside it, into ``base``.
        base: Directory of the base model.
        seed: Seed of suffix and heads.

    Returns:
        The folder.

    Example:
        >>> import tempfile
        >>> folder = saved_model(Path(tempfile.mkdtemp()) / "student")
        >>> sorted(path.name for path in folder.parent.iterdir()), LLM2VecGen(str(folder)).get_embedding_dimension()
        (['base', 'student'], 48)
    """
    base = saved_base(Path(folder).parent / "base") if base is None else base
    tiny_model(seed=seed, backbone=load_backbone(str(base))).save_pretrained(str(folder))
    return Path(folder)
