"""A copy of the index on a GPU, for searches without a filter."""

from __future__ import annotations

import threading
from typing import Any

import faiss
import numpy as np

from langchain_llm2vec_gen.store.kinds import Kind, search_parameters
from llm2vec_gen_st.extras import MissingExtraError


def check_device(device: str, kind: Kind) -> None:
    """Refuse a device that cannot be used, before anything is written.

    Args:
        device: ``cpu`` or ``cuda``.
        kind: The kind of index.

    Raises:
        ValueError: If there is no such device, or the kind of index is not for it.
        MissingExtraError: If the installed FAISS has no GPU support.
        RuntimeError: If there is no GPU.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}.")
    if device == "cpu":
        return
    if kind.is_graph:
        raise ValueError(f"index={kind.name!r}: FAISS has no such index for GPUs; use flat, ivf or ivfpq.")
    if not hasattr(faiss, "StandardGpuResources"):
        raise MissingExtraError(
            "device='cuda' needs FAISS with GPU support, and the installed one has none. Install it with: "
            "pip uninstall faiss-cpu && pip install 'llm2vec-gen-st[faiss-gpu]'"
        )
    if not faiss.get_num_gpus():
        raise RuntimeError("device='cuda': FAISS sees no GPU on this machine; use device='cpu'.")


class GpuMirror:
    """Searches a copy on the GPU; the index itself stays on the CPU, where it is changed, filtered and saved."""

    def __init__(self) -> None:
        self._resources = faiss.StandardGpuResources()
        self._lock = threading.Lock()
        self._index: Any = None
        self._rows = np.zeros(0, np.int64)

    def forget(self) -> None:
        """Drop the copy, since the index has changed; the next search makes a new one."""
        self._index = None

    def search(self, main: Any, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and distances of the k nearest, by FAISS's own measure; row -1 where there are fewer.

        Args:
            main: The index on the CPU, with its map of rows.
            query: (1, D), prepared.
            k: Neighbours wanted.
        """
        # One search at a time: they share FAISS's scratch memory on the GPU.
        with self._lock:
            if self._index is None:
                self._rows = faiss.vector_to_array(main.id_map)
                self._index = faiss.index_cpu_to_gpu(self._resources, 0, main.index)
            distances, places = self._index.search(query, k, params=search_parameters(main, k, None))
        return np.where(places[0] >= 0, self._rows[places[0]], -1), distances[0]
