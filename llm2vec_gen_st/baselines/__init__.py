"""The systems LLM2Vec-Gen is compared with, each a SentenceTransformer on any base LLM (paper, section 4).

``mean_pooling``, ``last_token``, ``echo`` and ``hyde`` need no training; ``llm2vec``, ``inbedder`` and ``gircse`` take
a plain LLM, or one that ``train_llm2vec``, ``train_inbedder`` and ``train_gircse`` have trained.
"""

from __future__ import annotations

from llm2vec_gen_st.baselines.echo import echo
from llm2vec_gen_st.baselines.gircse import gircse
from llm2vec_gen_st.baselines.gircse_training import train_gircse
from llm2vec_gen_st.baselines.hyde import hyde
from llm2vec_gen_st.baselines.inbedder import inbedder
from llm2vec_gen_st.baselines.inbedder_training import train_inbedder
from llm2vec_gen_st.baselines.llm2vec import llm2vec
from llm2vec_gen_st.baselines.llm2vec_training import train_llm2vec
from llm2vec_gen_st.baselines.pooling import last_token, mean_pooling
from llm2vec_gen_st.baselines.registry import BASELINES, Baseline, build
from llm2vec_gen_st.baselines.training import LoraSettings, StageSettings

__all__ = [
    "BASELINES",
    "Baseline",
    "LoraSettings",
    "StageSettings",
    "build",
    "echo",
    "gircse",
    "hyde",
    "inbedder",
    "last_token",
    "llm2vec",
    "mean_pooling",
    "train_gircse",
    "train_inbedder",
    "train_llm2vec",
]
