"""Every system that is compared on the real tasks, and how each is made on one base LLM.

Systems that learn are trained into a folder, once; the same call goes on where a stopped one was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone
from llm2vec_gen_st.baselines import build, llm2vec, train_gircse, train_inbedder, train_llm2vec
from llm2vec_gen_st.baselines.gircse_training import CONTRASTIVE_STAGE
from llm2vec_gen_st.baselines.inbedder import QUESTION
from llm2vec_gen_st.baselines.inbedder_training import QA_STAGE
from llm2vec_gen_st.baselines.llm2vec_training import MNTP_STAGE, SIMCSE_STAGE
from llm2vec_gen_st.baselines.training import StageSettings
from llm2vec_gen_st.evaluation.instructions import built_in_instructions
from llm2vec_gen_st.prompts import DEFAULT_PROMPTS, DOCUMENT
from llm2vec_gen_st.responses import read_responses
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.teachers.sources import MINILM, packaged_minilm
from llm2vec_gen_st.training import RECIPES, ridge_heads, suffix_from_text, train
from llm2vec_gen_st.training.data import prepare_labels, split_held_out, student_rows
from llm2vec_gen_st.training.warm_start import ridge_map
from llm2vec_gen_st.training.whitening import whitening_map

SELF_RECIPE = "smollm2-135m-self"


@dataclass(frozen=True)
class Workshop:
    """What systems are made of, and where those that are trained here are kept.

    Args:
        folder: Trained systems go here.
        responses: What `llm2vec-gen respond` wrote.
        dtype: Of the frozen LLM.
        mntp_steps: Steps of LLM2Vec's first stage.
        simcse_steps: Steps of its second.
        pair_steps: Steps of InBedder and of GIRCSE, 32 pairs of query and response each.
        student_steps: Steps of the students that are trained here; the recipe's own if 0.
    """

    folder: Path
    responses: Path
    dtype: str = "bfloat16"
    mntp_steps: int = 300
    simcse_steps: int = 100
    pair_steps: int = 100
    student_steps: int = 0

    def backbone(self) -> Backbone:
        """A copy of the base of its own, so that no system sees another's LoRA layers."""
        return load_backbone(SMOLLM2_ID, model_kwargs={"dtype": self.dtype})

    @cached_property
    def rows(self) -> Dataset:
        """Queries and responses that systems may learn from."""
        found = read_responses(self.responses, include=("ok", "cut_off"), partial=True)
        fit, _ = split_held_out(found, RECIPES[SELF_RECIPE])
        return fit

    def llm2vec(self) -> SentenceTransformer:
        """LLM2Vec on this base: MNTP, then unsupervised SimCSE, both on the responses."""
        folder = self.folder / "llm2vec"
        if not (folder / "modules.json").exists():
            train_llm2vec(
                self.backbone(),
                list(self.rows["response"]),
                folder,
                mntp=replace(MNTP_STAGE, steps=self.mntp_steps, max_seq_length=64, learning_rate=2e-4),
                simcse=replace(SIMCSE_STAGE, steps=self.simcse_steps, max_seq_length=32, batch_size=64),
            )
        return llm2vec(folder, base=self.backbone())

    def inbedder(self) -> SentenceTransformer:
        """InBedder on this base. What a response is about, its query says: a question with a free answer."""
        folder = self.folder / "inbedder"
        if not (folder / "modules.json").exists():
            rows = [{"text": row["response"], "question": QUESTION, "answer": row["query"]} for row in self.rows]
            train_inbedder(self.backbone(), rows, folder, stage=self._pair_stage(QA_STAGE))
        return build("inbedder", folder, base=self.backbone())

    def gircse(self) -> SentenceTransformer:
        """GIRCSE on this base, a query's response as its positive."""
        folder = self.folder / "gircse"
        if not (folder / "modules.json").exists():
            rows = [{"anchor": row["query"], "positive": row["response"]} for row in self.rows]
            train_gircse(self.backbone(), rows, folder, stage=self._pair_stage(CONTRASTIVE_STAGE))
        return build("gircse", folder, base=self.backbone())

    def _pair_stage(self, stage: StageSettings) -> StageSettings:
        return replace(
            stage, steps=self.pair_steps, warmup_steps=self.pair_steps // 10, max_seq_length=64, save_steps=20
        )

    def student(self, name: str, teacher: str | SentenceTransformer, **overrides: Any) -> SentenceTransformer:
        """A student of a teacher that never saw a label, by the recipe of the built-in self-taught one."""
        if self.student_steps:
            overrides = {"max_steps": self.student_steps, **overrides}
        folder = self.folder / name
        if not (folder / "modules.json").exists():
            train(
                self.responses, folder, teacher=teacher, recipe=SELF_RECIPE, partial=True, dtype=self.dtype, **overrides
            )
        return LLM2VecGen(str(folder), backbone=self.backbone())

    def ridge_student(self) -> SentenceTransformer:
        """The start of the self-taught student: suffix from text, heads by ridge regression, nothing trained."""
        recipe = RECIPES[SELF_RECIPE]
        backbone = self.backbone()
        texts, labels = self._targets(backbone)
        model = LLM2VecGen.from_base(backbone, embedding_dim=labels.shape[1])
        suffix_from_text(model, recipe.suffix_text)
        ridge_heads(model, texts, labels)
        return model

    def mean_under_ridge(self) -> SentenceTransformer:
        """Mean pooling of the same instructed texts, under a ridge head fitted on the same targets: no suffix."""
        backbone = self.backbone()
        texts, labels = self._targets(backbone)
        model = build("mean", backbone)
        # As it is evaluated: an instruction is read, and not pooled.
        recipe = RECIPES[SELF_RECIPE]
        prompts = sorted((*recipe.query_prompts, recipe.document_prompt), key=len, reverse=True)
        prompt_of = [next(prompt for prompt in prompts if text.startswith(prompt)) for text in texts]
        vectors = np.zeros((len(texts), model.get_embedding_dimension() or 0), np.float32)
        for prompt in set(prompt_of):
            rows = [row for row, found in enumerate(prompt_of) if found == prompt]
            bare = [texts[row].removeprefix(prompt) for row in rows]
            vectors[rows] = model.encode(bare, prompt=prompt, batch_size=64, show_progress_bar=True)
        weight, bias, _ = ridge_map(torch.as_tensor(vectors), labels)
        return with_affine(model, weight, bias)

    def self_teacher(self) -> SentenceTransformer:
        """The frozen LLM as teacher: mean pooling of any text behind the document's instruction."""
        model = build("mean", self.backbone(), prompts=dict.fromkeys(DEFAULT_PROMPTS, DOCUMENT))
        model.default_prompt_name = "document"
        return model

    def whitened_self(self) -> SentenceTransformer:
        """The self-teacher's vectors, whitened on the responses: all that a closed-form head could owe to whitening."""
        model = self.self_teacher()
        vectors = torch.as_tensor(
            model.encode(list(self.rows["response"])[:4000], batch_size=64, show_progress_bar=True)
        )
        weight, center = whitening_map(vectors, 1.0, shrinkage=1e-3)
        return with_affine(model, weight, -weight @ center)

    def _targets(self, backbone: Backbone) -> tuple[list[str], np.ndarray]:
        """Instructed texts, and the self-teacher's vectors of their targets, as the recipe's ridge start sees them."""
        recipe = RECIPES[SELF_RECIPE]
        rows = student_rows(self.rows, recipe)
        rows = rows.select(np.random.default_rng(recipe.seed).permutation(len(rows))[: recipe.ridge_rows])
        vectors = teacher_embeddings(
            list(rows["response"]), "self", backbone=backbone, cache=self.folder / "labels.sqlite"
        )
        return list(rows["query"]), prepare_labels(vectors, recipe)[0]


def with_affine(model: SentenceTransformer, weight: torch.Tensor, bias: torch.Tensor) -> SentenceTransformer:
    """The encoder with an affine map behind it.

    Args:
        model: The encoder, of width H.
        weight: (D, H).
        bias: (D).
    """
    dense = Dense(weight.shape[1], weight.shape[0], activation_function=torch.nn.Identity())
    prompts = {name: text for name, text in model.prompts.items() if text is not None}
    made = SentenceTransformer(modules=[*model, dense.to(model.device)], prompts=prompts)
    made.default_prompt_name = model.default_prompt_name
    # The host has cast it to the LLM's dtype, but pooled vectors are float32.
    dense.float()
    with torch.no_grad():
        dense.linear.weight.copy_(weight.float())
        dense.linear.bias.copy_(bias.float())
    return made


def minilm() -> SentenceTransformer:
    """all-MiniLM-L6-v2, from its package if that is installed."""
    return SentenceTransformer(str(packaged_minilm() or MINILM))


@dataclass(frozen=True)
class System:
    """One system of the comparison.

    Args:
        make: Makes it.
        passes: Forward passes of the LLM over the texts of one query, tokens that it writes apart.
        generated: Tokens that the LLM writes for one query.
        learned: Whether it learned from the queries.
        instructions: Instructions by mteb's names of prompts; the system's own if not given.
        folders: Tasks that it runs; all if not given.
    """

    make: Callable[[Workshop], SentenceTransformer]
    passes: int = 1
    generated: int = 0
    learned: bool = True
    instructions: Mapping[str, str] | None = None
    folders: tuple[str, ...] | None = None


# Tasks whose queries are told from their documents.
ASYMMETRIC = ("NovelEvalReranking", "LegalSummarization", "MSMARCOSubset", "AdvBenchIR")
HYDE_TOKENS = 64
# The recipe's second stage trains decoding alone and leaves every embedding as it is.
EMBEDDING_ONLY = {"recon_steps": 0}

SYSTEMS: dict[str, System] = {
    "mean": System(lambda shop: build("mean", shop.backbone()), learned=False),
    "last": System(lambda shop: build("last", shop.backbone()), learned=False),
    "echo": System(lambda shop: build("echo", shop.backbone()), learned=False),
    "mean, instructed": System(
        lambda shop: build("mean", shop.backbone()), learned=False, instructions=built_in_instructions()
    ),
    "hyde": System(
        lambda shop: build(
            "hyde",
            shop.backbone(),
            answers=1,
            temperature=0.0,
            max_new_tokens=HYDE_TOKENS,
            batch_size=64,
            cache=shop.folder / "hyde.sqlite",
            # Its documents are encoded as its answers are, without an instruction.
            prompts={**built_in_instructions(), "document": ""},
        ),
        # The prompt, then the query and the answer as the encoder reads them.
        passes=3,
        generated=HYDE_TOKENS,
        learned=False,
        # Elsewhere it would answer every text: hours on a CPU.
        folders=ASYMMETRIC,
    ),
    "self teacher": System(Workshop.self_teacher, learned=False),
    "self teacher, whitened": System(Workshop.whitened_self),
    "mean under ridge, self": System(Workshop.mean_under_ridge, instructions=built_in_instructions()),
    "ridge start, self": System(Workshop.ridge_student),
    "student of self": System(lambda shop: LLM2VecGen("llm2vec-gen-smollm2-135m-self", backbone=shop.backbone())),
    # For the two below: the same rows and steps, nothing else changed.
    "student of self, few steps": System(lambda shop: shop.student("self-few", "self", **EMBEDDING_ONLY)),
    "student of self, random start": System(
        lambda shop: shop.student(
            "self-random",
            "self",
            init="random",
            learning_rate=1e-3,
            align_learning_rate=None,
            recon_learning_rate=None,
            **EMBEDDING_ONLY,
        )
    ),
    "student of self, both losses at once": System(
        lambda shop: shop.student("self-both", "self", recon_weight=1.0, recon_steps=0, recon_share=0.25)
    ),
    "llm2vec": System(Workshop.llm2vec),
    "inbedder, not trained": System(lambda shop: build("inbedder", shop.backbone()), learned=False),
    "inbedder": System(Workshop.inbedder),
    # Its soft tokens are fed back one by one, as written tokens are.
    "gircse": System(Workshop.gircse, generated=5),
    "student of llm2vec": System(lambda shop: shop.student("of-llm2vec", shop.llm2vec(), **EMBEDDING_ONLY)),
    "student of minilm": System(lambda shop: LLM2VecGen("llm2vec-gen-smollm2-135m", backbone=shop.backbone())),
    "all-MiniLM-L6-v2": System(lambda shop: minilm(), passes=0, learned=False),
}
