"""Reading an embedding: what its soft prompt says, which words and contexts its states hold, and where it lies."""

from __future__ import annotations

from llm2vec_gen_st.interpret.chaining import ChainStep, latent_chain
from llm2vec_gen_st.interpret.decode import decode_ids, decoded_texts
from llm2vec_gen_st.interpret.dropping import ENGLISH_STOP_WORDS, Dropping
from llm2vec_gen_st.interpret.idea_map import IdeaMap, MapPoint, Separation, idea_map
from llm2vec_gen_st.interpret.latent_lens import ContextMatch, LatentLens, build_latent_lens
from llm2vec_gen_st.interpret.logit_lens import LensToken, logit_lens
from llm2vec_gen_st.interpret.messages import (
    LatentMessage,
    MessageError,
    Transcript,
    answer_messages,
    receive_message,
    send_messages,
)
from llm2vec_gen_st.interpret.pages import write_lens_page, write_map_page
from llm2vec_gen_st.interpret.pictures import draw_lens, draw_map
from llm2vec_gen_st.interpret.safety import REFUSAL_WORDS, RefusalView, refusal_view, refuses
from llm2vec_gen_st.interpret.states import compression_states

__all__ = [
    "ENGLISH_STOP_WORDS",
    "REFUSAL_WORDS",
    "ChainStep",
    "ContextMatch",
    "Dropping",
    "IdeaMap",
    "LatentLens",
    "LatentMessage",
    "LensToken",
    "MapPoint",
    "MessageError",
    "RefusalView",
    "Separation",
    "Transcript",
    "answer_messages",
    "build_latent_lens",
    "compression_states",
    "decode_ids",
    "decoded_texts",
    "draw_lens",
    "draw_map",
    "idea_map",
    "latent_chain",
    "logit_lens",
    "receive_message",
    "refusal_view",
    "refuses",
    "send_messages",
    "write_lens_page",
    "write_map_page",
]
