"""What a store and its user agree on when it is opened: the metric, the kind of index, and the embedding."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_core.embeddings import Embeddings

from langchain_llm2vec_gen.store.database import Database
from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.gpu import check_device
from langchain_llm2vec_gen.store.kinds import Kind, kind_of_any_dimension
from langchain_llm2vec_gen.store.metrics import Metric, as_metric


@dataclass(frozen=True)
class Agreement:
    """How a store measures and how it is indexed.

    Args:
        metric: ``cosine``, ``ip`` or ``l2``.
        index: Name of the kind of index.

    Example:
        >>> Agreement("cosine", "hnsw").kind(384).factory(1000)
        'HNSW32'
    """

    metric: Metric
    index: str

    def kind(self, dimension: int) -> Kind:
        """The kind of index for vectors of a dimension.

        Raises:
            ValueError: If FAISS cannot build it.
        """
        return Kind(self.index, dimension, self.metric)


def agree(
    database: Database,
    metric: Metric | None,
    index: str | None,
    embedding: Embeddings | None,
    *,
    device: str,
    verify: bool,
) -> Agreement:
    """Settle metric, index and embedding between what the store says and what was asked for.

    What is new is written into the store, unless it is read-only.

    Args:
        database: The store's file.
        metric: The one asked for; the store's, or cosine, if None.
        index: The one asked for; the store's, or flat, if None.
        embedding: The one given, if any.
        device: Where the index is to be searched.
        verify: Whether an embedding other than the one that made the store is refused.

    Raises:
        StoreError: If the embedding is another one, or a read-only store would have to change.
        ValueError: If FAISS cannot build the index for the store's vectors (for vectors of any dimension, while there
            are none), or there is no such device.
        MissingExtraError: If the installed FAISS has no GPU support, and the device is one.
        RuntimeError: If there is no GPU.
    """
    with database.reading() as snapshot:
        found, dimension = snapshot.settings(), snapshot.dimension
    wanted = {
        "metric": metric or found.get("metric", "cosine"),
        "index": index or found.get("index", "flat"),
    }
    agreement = Agreement(as_metric(wanted["metric"]), wanted["index"])
    # Before anything is stored, and before texts are embedded in vain.
    kind = agreement.kind(dimension) if dimension else kind_of_any_dimension(agreement.index, agreement.metric)
    check_device(device, kind)
    made_by, ours = found.get("embedding"), _fingerprint(embedding)
    if verify and made_by is not None and ours is not None and made_by != ours:
        raise StoreError(
            f"{database.path}: its vectors were made by the embedding {made_by}, and the one given is {ours}; their "
            "vectors cannot be compared. Give the same embedding, or verify_embedding=False if you know better."
        )
    changed = {key: value for key, value in wanted.items() if found.get(key) != value}
    if database.read_only:
        if changed and "metric" in found:
            told = ", ".join(f"{key} {found[key]!r}, not {value!r}" for key, value in changed.items())
            raise StoreError(f"{database.path}: the store has {told}; open it without read_only to change that.")
        return agreement
    if made_by is None and ours is not None:
        changed["embedding"] = ours
    if changed:
        with database.changing() as transaction:
            for key, value in changed.items():
                transaction.set(key, value)
    return agreement


def _fingerprint(embedding: Embeddings | None) -> str | None:
    """What tells one embedding from another: its own fingerprint, or its class and the name of its model."""
    if embedding is None:
        return None
    own = getattr(embedding, "fingerprint", None)
    if isinstance(own, str):
        return own
    names = (getattr(embedding, name, None) for name in ("model", "model_name", "model_id"))
    model = next((name for name in names if isinstance(name, str)), None)
    kind = f"{type(embedding).__module__}.{type(embedding).__qualname__}"
    return kind if model is None else f"{kind}({model})"
