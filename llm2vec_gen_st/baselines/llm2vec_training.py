"""Training LLM2Vec (BehnamGhader et al. 2024): masked next token prediction, then unsupervised SimCSE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.llm2vec import LLM2VecTransformer
from llm2vec_gen_st.baselines.llm_module import as_backbone
from llm2vec_gen_st.baselines.lora_stack import Lora, apply, lora_of, stack
from llm2vec_gen_st.baselines.training import (
    RUN_FOLDER,
    LoraSettings,
    StageSettings,
    dataset_of,
    fit,
    module_of,
    require_trainer,
    rows_digest,
    settings_of,
    training_run,
)
from llm2vec_gen_st.losses.cross_entropy import check_lm_logits, chunked_cross_entropy, lm_logits
from llm2vec_gen_st.modules.lora import add_lora, lora_parameters, remove_lora

MNTP_STAGE = StageSettings(steps=1000, batch_size=32, learning_rate=5e-5, max_seq_length=512)
SIMCSE_STAGE = StageSettings(steps=1000, batch_size=128, learning_rate=3e-5, max_seq_length=128)

_IGNORED = -100


def mask_tokens(
    ids: torch.Tensor,
    mask: torch.Tensor,
    mask_id: int,
    vocabulary: int,
    *,
    share: float,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Corrupt a share of the tokens, as BERT does: of them 80 % masked, 10 % replaced at random, 10 % left.

    A row's first token is never chosen: no position before it could predict it.

    Args:
        ids: Token ids (B, T).
        mask: 1 where there is a token (B, T).
        mask_id: Id that stands for a masked token.
        vocabulary: Number of ids to replace from.
        share: Share of the tokens chosen.
        generator: Source of the choices, on the CPU; the global one if not given.

    Returns:
        The corrupted ids, and the labels: the true id where a token was chosen, else -100.
    """
    draw = torch.rand(ids.shape, generator=generator).to(ids.device)
    allowed = mask.bool() & (torch.arange(ids.shape[1], device=ids.device) > 0)
    chosen = (draw < share) & allowed
    if not chosen.any():
        chosen = allowed & (draw == draw.masked_fill(~allowed, 2.0).min())
    kind = torch.rand(ids.shape, generator=generator).to(ids.device)
    other = torch.randint(vocabulary, ids.shape, generator=generator).to(ids.device)
    corrupted = torch.where(chosen & (kind < 0.8), torch.full_like(ids, mask_id), ids)
    corrupted = torch.where(chosen & (kind >= 0.8) & (kind < 0.9), other, corrupted)
    return corrupted, torch.where(chosen, ids, torch.full_like(ids, _IGNORED))


class MaskedNextTokenLoss(nn.Module):
    """Cross entropy of masked tokens, each predicted from the position *before* it, with attention in both directions.

    So the LLM's own head is used as it was trained: at position i it predicts token i + 1.

    Args:
        model: An LLM2Vec encoder.
        share: Share of the tokens that are chosen.
        mask_text: Text whose first token stands for a masked one, where the tokenizer has no mask token.
    """

    def __init__(self, model: SentenceTransformer, *, share: float = 0.2, mask_text: str = "_") -> None:
        super().__init__()
        self.model = model
        self.share = share
        module = module_of(model)
        known = module.tokenizer.mask_token_id
        self.mask_id = int(known) if known is not None else module.text_ids(mask_text, 8)[0][0]
        check_lm_logits(module.llm)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Any = None) -> torch.Tensor:
        """Mean loss of the chosen tokens of one batch."""
        (features,) = sentence_features
        return self.loss(features["input_ids"], features["attention_mask"])

    def loss(self, ids: torch.Tensor, mask: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Mean loss of right-padded rows (B, T), at tokens that the generator chooses."""
        module = module_of(self.model)
        vocabulary = len(module.tokenizer)
        corrupted, targets = mask_tokens(ids, mask, self.mask_id, vocabulary, share=self.share, generator=generator)
        with module.own_pass():
            hidden = module.hidden_states(corrupted, mask.sum(dim=1))
            predicted = targets[:, 1:] != _IGNORED
            states = hidden[:, :-1][predicted.to(hidden.device)]
            wanted = targets[:, 1:][predicted].to(hidden.device)
            total = chunked_cross_entropy(states, wanted, lambda part: lm_logits(module.llm, part).to(part.device))
        return total / max(1, len(wanted))


@torch.no_grad()
def masked_loss(model: SentenceTransformer, texts: Sequence[str], *, seed: int = 0, batch_size: int = 32) -> float:
    """Held-out loss of masked next token prediction, at the same tokens in every call.

    Args:
        model: An LLM2Vec encoder.
        texts: Texts of at least two tokens.
        seed: Seed of the choice of tokens.
        batch_size: Texts run at once.

    Returns:
        Mean over the batches.
    """
    measured = MaskedNextTokenLoss(model)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start in range(0, len(texts), batch_size):
        features = model.preprocess(list(texts[start : start + batch_size]))
        device = module_of(model).llm.device
        ids, mask = features["input_ids"].to(device), features["attention_mask"].to(device)
        found.append(float(measured.loss(ids, mask, generator)))
    return sum(found) / len(found)


def train_llm2vec(
    base: str | Backbone,
    texts: Sequence[str],
    output_dir: str | Path,
    *,
    simcse_texts: Sequence[str] | None = None,
    mntp: StageSettings | None = MNTP_STAGE,
    simcse: StageSettings | None = SIMCSE_STAGE,
    lora: LoraSettings | None = None,
    dropout: float = 0.3,
    scale: float = 20.0,
    model_kwargs: dict[str, Any] | None = None,
    progress: bool = True,
) -> SentenceTransformer:
    """Train LLM2Vec without labels and save it; the same call again goes on where a stopped one was.

    Masked next token prediction trains one LoRA; SimCSE trains a second on top of it, from two passes of each text that
    differ in attention dropout alone. Both are kept as one LoRA of twice the rank; the base model is never changed.

    Args:
        base: The LLM: hub id, directory, or loaded backbone without LoRA layers.
        texts: Texts of any kind; those of fewer than two tokens are left out.
        output_dir: Where the encoder goes; ``training/`` inside it holds settings, logs and, until the end,
            checkpoints.
        simcse_texts: Other texts for SimCSE, such as single sentences.
        mntp: Settings of the first stage; ``None`` leaves it out.
        simcse: Settings of the second stage; ``None`` leaves it out.
        lora: LoRA layers of each stage; rank 16 on all linear layers if not given.
        dropout: Share of attention weights dropped in SimCSE.
        scale: Factor of the cosines in SimCSE.
        model_kwargs: Passed on when the base model is loaded.
        progress: Whether progress bars are shown.

    Returns:
        The encoder; :func:`~llm2vec_gen_st.baselines.llm2vec` loads it again.

    Raises:
        ValueError: If there are too few texts or no stage, or the folder holds another run.
    """
    if mntp is None and simcse is None:
        raise ValueError("Nothing would be trained: give settings for mntp, simcse, or both.")
    require_trainer()
    lora = lora or LoraSettings()
    output = Path(output_dir)
    run = output / RUN_FOLDER
    backbone = as_backbone(base, model_kwargs)
    rows = [{"text": text} for text in texts]
    second = list(dict.fromkeys(simcse_texts if simcse_texts is not None else texts))
    pairs = [{"text": text, "anchor": text, "positive": text} for text in second]
    depends_on = {
        "texts_sha256": rows_digest(rows, ["text"]),
        "simcse_texts_sha256": rows_digest(pairs, ["text"]),
        "mntp": None if mntp is None else settings_of(mntp),
        "simcse": None if simcse is None else settings_of(simcse),
        "dropout": dropout,
        "scale": scale,
    }
    with training_run(
        output,
        LLM2VecTransformer,
        backbone,
        lora,
        seed=(mntp or simcse or MNTP_STAGE).seed,
        depends_on=depends_on,
        model_kwargs=model_kwargs,
    ) as (model, module):
        if mntp is not None:
            long = [row for row in rows if len(module.text_ids(row["text"], 2, special=True)[0]) > 1]
            columns = dataset_of(long, ["text"])
            fit(model, columns, MaskedNextTokenLoss(model), mntp, run / "mntp", progress=progress)
        if simcse is not None:
            frozen = None
            if mntp is not None:
                frozen = lora_of(module.llm, module.lora or {})
                _second_lora(module, frozen, lora, simcse.seed)
            module.attention_dropout = dropout
            with kept(module, frozen.rank if frozen is not None else 0):
                loss = MultipleNegativesRankingLoss(model, scale=scale)
                columns = dataset_of(pairs, ["anchor", "positive"])
                fit(model, columns, loss, simcse, run / "simcse", progress=progress)
            module.attention_dropout = 0.0
    return model


def _second_lora(module: LLM2VecTransformer, frozen: Lora, lora: LoraSettings, seed: int) -> None:
    """Widen the module's LoRA: its matrices so far, and new ones beside them that start at no change."""
    settings = {
        **lora.as_config(),
        "r": frozen.rank + lora.r,
        "lora_alpha": lora.lora_alpha / lora.r * (frozen.rank + lora.r),
    }
    remove_lora(module.llm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        add_lora(module.llm, settings)
    # What peft starts LoRA layers with: random A, and B of zeros.
    started = lora_of(module.llm, settings)
    fresh = {
        name: tensor[-lora.r :] if name.endswith(".lora_A") else tensor[:, -lora.r :]
        for name, tensor in started.tensors.items()
    }
    apply(module.llm, stack([frozen, Lora(fresh, started.scaling)], started.scaling), "the first stage")
    module.lora = settings


@contextmanager
def kept(module: LLM2VecTransformer, rank: int) -> Iterator[None]:
    """A block in which the first ``rank`` directions of the module's LoRA get no gradient, and so stay as they are."""
    hooks = []
    for name, parameter in lora_parameters(module.llm).items():
        axis = 0 if name.endswith(".lora_A") else 1
        free = (torch.arange(parameter.shape[axis], device=parameter.device) >= rank).to(parameter.dtype)
        shaped = free[:, None] if axis == 0 else free[None, :]
        hooks.append(parameter.register_hook(lambda gradient, shaped=shaped: gradient * shaped))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
