"""Reading an embedding: what its soft prompt says, which words and contexts its states hold, and where it lies."""

from __future__ import annotations

from llm2vec_gen_st.interpret.decode import decode_ids, decoded_texts
from llm2vec_gen_st.interpret.dropping import ENGLISH_STOP_WORDS, Dropping
from llm2vec_gen_st.interpret.idea_map import IdeaMap, MapPoint, Separation, idea_map
from llm2vec_gen_st.interpret.latent_lens import ContextMatch, LatentLens, build_latent_lens
from llm2vec_gen_st.interpret.logit_lens import LensToken, logit_lens
from llm2vec_gen_st.interpret.pages import write_lens_page, write_map_page
from llm2vec_gen_st.interpret.pictures import draw_lens, draw_map
from llm2vec_gen_st.interpret.states import compression_states

__all__ = [
    "ENGLISH_STOP_WORDS",
    "ContextMatch",
    "Dropping",
    "IdeaMap",
    "LatentLens",
    "LensToken",
    "MapPoint",
    "Separation",
    "build_latent_lens",
    "compression_states",
    "decode_ids",
    "decoded_texts",
    "draw_lens",
    "draw_map",
    "idea_map",
    "logit_lens",
    "write_lens_page",
    "write_map_page",
]
