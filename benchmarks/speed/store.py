"""FaissStore beside raw FAISS and langchain-community's FAISS store: adding, searching, filtering, reopening, sizes.

    python benchmarks/speed/store.py WORK                 # 100,000 vectors, every kind of index
    python benchmarks/speed/store.py WORK --million       # one run at 1,000,000 vectors with IVF

WORK is a folder for data, stores and the benchmark's own virtual environment (langchain-community is no dependency of
this package). Vectors are drawn around a 32-dimensional subspace, as embeddings lie; vectors without any structure
have no near neighbours for an approximate index to find. All systems run in one process, turn by turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "numpy==2.4.6",
    "faiss-cpu==1.15.1",
    "langchain-core==1.8.3",
    "langchain-community",
    "tqdm",
    "typing_extensions",
    "psutil==7.2.2",
)
DIMENSION, K, TURN = 384, 10, 20
KINDS = ("flat", "hnsw", "ivf", "ivfpq")
SHARES = (0.5, 0.05, 0.001)


def main() -> None:
    """Make the environment if need be, and run the benchmark in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5, help="of adding and reopening")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--output", type=Path, help="write the tables as Markdown")
    parser.add_argument("--resident", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    python = arguments.work / "venv" / "bin" / "python"
    if Path(sys.prefix).resolve() != python.parent.parent.resolve():
        arguments.work.mkdir(parents=True, exist_ok=True)
        if not python.exists():
            venv.create(python.parent.parent, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
        raise SystemExit(subprocess.run([python, *sys.argv], env={**os.environ, "PYTHONPATH": paths}).returncode)
    if arguments.resident:
        print(resident(*arguments.resident))
        return
    run(arguments)


def run(arguments: Any) -> None:
    """Measure, and print the tables."""
    import faiss

    count = 1_000_000 if arguments.million else arguments.vectors
    vectors, queries = data(arguments.work, count, arguments.queries)
    tables: list[str] = []
    title = f"{count:,} vectors of {DIMENSION} dimensions, k = {K}, {arguments.queries} queries"
    tables.append(
        f"{title}; {os.cpu_count()} cores, {faiss.omp_get_max_threads()} threads, FAISS {faiss.__version__}\n"
    )
    kinds = ["ivf"] if arguments.million else arguments.kinds
    exact = nearest(vectors, queries)
    if not arguments.million:
        tables.append(adding(arguments, vectors))
    tables.append(searching(arguments, vectors, queries, exact, kinds))
    tables.append(filtering(arguments, vectors, queries, kinds))
    tables.append(opening(arguments, vectors, kinds))
    text = "\n".join(tables)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


def data(work: Path, count: int, queries: int) -> tuple[Any, Any]:
    """Vectors (N, D) as a memory map, and queries (Q, D), from the same distribution."""
    import numpy as np

    path = work / f"vectors-{count}.npy"
    generator = np.random.default_rng(0)
    basis = generator.standard_normal((32, DIMENSION)).astype(np.float32)
    centers = generator.standard_normal((200, 32)).astype(np.float32)

    def draw(rows: int) -> Any:
        inside = centers[generator.integers(len(centers), size=rows)] + 0.6 * generator.standard_normal((rows, 32))
        found = inside.astype(np.float32) @ basis + generator.standard_normal((rows, DIMENSION)).astype(np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    asked = draw(queries)
    if not path.exists():
        file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, DIMENSION))
        for start in range(0, count, 50_000):
            file[start : start + 50_000] = draw(min(50_000, count - start))
        file.flush()
    return np.load(path, mmap_mode="r"), asked


def nearest(vectors: Any, queries: Any, rows: Any = None) -> list[set[int]]:
    """The K nearest of all, or of some rows, by comparison with every one."""
    import numpy as np

    chosen = vectors if rows is None else np.ascontiguousarray(vectors[rows])
    scores = queries @ np.asarray(chosen).T
    best = np.argpartition(-scores, min(K, len(chosen)) - 1, axis=1)[:, :K]
    return [set((found if rows is None else rows[found]).tolist()) for found in best]


def texts_of(count: int) -> list[str]:
    """A short text for each vector."""
    return [f"Passage number {number}, which stands here for a text of some length." for number in range(count)]


def metadatas_of(count: int) -> list[dict[str, Any]]:
    """Metadata for each vector: its number, and a field for each share that a filter lets through."""
    places = [round(1 / share) for share in SHARES]
    return [{"number": number, **{f"every{place}": number % place == 0 for place in places}} for number in range(count)]


def community(vectors: Any, texts: list[str], metadatas: list[dict[str, Any]]) -> Any:
    """A store of langchain-community that holds the vectors."""
    from langchain_community.vectorstores import FAISS
    from langchain_core.embeddings import FakeEmbeddings

    return FAISS.from_embeddings(
        zip(texts, vectors.tolist(), strict=True),
        FakeEmbeddings(size=DIMENSION),
        metadatas=metadatas,
        ids=[str(number) for number in range(len(texts))],
        distance_strategy="MAX_INNER_PRODUCT",
    )


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """How long something takes, and what it gives."""
    start = time.perf_counter()
    found = action()
    return time.perf_counter() - start, found


def store_path(work: Path, kind: str, count: int) -> Path:
    """The store of one kind."""
    return work / f"{kind}-{count}" / "corpus.store"


def build(work: Path, kind: str, vectors: Any, texts: list[str], metadatas: list[dict[str, Any]]) -> Any:
    """A new store that holds the vectors."""
    from langchain_llm2vec_gen import FaissStore

    path = store_path(work, kind, len(vectors))
    shutil.rmtree(path.parent, ignore_errors=True)
    store = FaissStore(path, index=kind)
    store.add_embeddings(texts, vectors, metadatas, ids=[str(number) for number in range(len(vectors))])
    return store


def adding(arguments: Any, vectors: Any) -> str:
    """Time to add all vectors with text and metadata, turn by turn."""
    import faiss
    import numpy as np

    count = len(vectors)
    texts, metadatas, block = texts_of(count), metadatas_of(count), np.array(vectors)

    def raw() -> None:
        faiss.IndexFlatIP(DIMENSION).add(block)

    def ours() -> None:
        build(arguments.work, "flat", block, texts, metadatas).close()

    systems: dict[str, Callable[[], Any]] = {
        "raw FAISS (vectors alone, in memory)": raw,
        "langchain-community (in memory)": lambda: community(block, texts, metadatas),
        "FaissStore (on disk, durable)": ours,
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(arguments.repeats):
        for name, action in systems.items():
            times[name].append(seconds(action)[0])
    base = statistics.median(times["langchain-community (in memory)"])
    rows = [
        [name, f"{statistics.median(found) / base:.2f}", f"{statistics.median(found):.2f}"]
        for name, found in times.items()
    ]
    return table(f"Adding {count:,} vectors", ["system", "time / langchain-community", "seconds"], rows)


def searching(arguments: Any, vectors: Any, queries: Any, exact: list[set[int]], kinds: list[str]) -> str:
    """Latency of one query and recall, for each kind of index, beside FAISS on the very same index."""
    import faiss
    from langchain_llm2vec_gen.store.kinds import search_parameters

    count = len(vectors)
    texts, metadatas = texts_of(count), metadatas_of(count)
    peer = None if arguments.million else community(vectors, texts, metadatas)
    rows = []
    for kind in kinds:
        path = store_path(arguments.work, kind, count)
        took, store = seconds(lambda kind=kind: build(arguments.work, kind, vectors, texts, metadatas))
        store.save()
        (file,) = path.parent.glob("*.faiss")
        bare = faiss.read_index(str(file))
        systems: dict[str, Callable[[Any], Any]] = {
            "raw": lambda query, bare=bare: bare.search(query[None], K, params=search_parameters(bare.index, K, None)),
            "ours": lambda query, store=store: store.similarity_search_by_vector(query, K),
        }
        if kind == "flat" and peer is not None:
            systems["community"] = lambda query: peer.similarity_search_by_vector(query, K)
        times, found = latencies(systems, queries)
        numbers = [{int(document.id) for document in documents} for documents in found["ours"]]
        base = statistics.median(times["raw"])
        row = [kind, f"{recall(numbers, exact):.3f}", f"{took:.1f}"]
        for name in ("raw", "ours", "community"):
            if name in times:
                row.append(f"{1e3 * statistics.median(times[name]):.2f} / {1e3 * percentile(times[name], 99):.2f}")
            else:
                row.append("")
        row.append(f"{statistics.median(times['ours']) / base:.2f}")
        rows.append(row)
        store.close()
    heads = ["index", "recall@10", "build, s", "raw FAISS p50 / p99, ms", "FaissStore p50 / p99, ms"]
    return table("Searching", [*heads, "langchain-community p50 / p99, ms", "FaissStore / raw (p50)"], rows)


def filtering(arguments: Any, vectors: Any, queries: Any, kinds: list[str]) -> str:
    """Latency and recall with filters that let 50 %, 5 % and 0.1 % of the vectors through."""
    import numpy as np
    from langchain_llm2vec_gen import FaissStore

    count = len(vectors)
    peer = None if arguments.million else community(vectors, texts_of(count), metadatas_of(count))
    rows = []
    for share in SHARES:
        place = round(1 / share)
        filter = {f"every{place}": True}
        expected = nearest(vectors, queries, np.arange(0, count, place))
        for kind in kinds:
            with FaissStore(store_path(arguments.work, kind, count)) as store:
                search = partial(store.similarity_search_by_vector, k=K, filter=filter)
                first, _ = seconds(partial(search, queries[0]))
                times, found = latencies({"ours": search}, queries)
                strategy = store.explain(K, filter)["strategy"]
            numbers = [{int(document.id) for document in documents} for documents in found["ours"]]
            rows.append(filter_row(share, f"FaissStore, {kind}", strategy, numbers, expected, first, times["ours"]))
        if peer is not None:
            search = partial(peer.similarity_search_by_vector, k=K, filter=filter)
            first, _ = seconds(partial(search, queries[0]))
            times, found = latencies({"peer": search}, queries)
            numbers = [{int(document.metadata["number"]) for document in documents} for documents in found["peer"]]
            rows.append(
                filter_row(share, "langchain-community, flat", "after search", numbers, expected, first, times["peer"])
            )
    heads = ["admitted", "system", "strategy", "recall@10", "first query, ms", "later p50 / p99, ms"]
    return table("Filtered search", heads, rows)


def filter_row(
    share: float, name: str, how: str, found: list[set[int]], expected: list[set[int]], first: float, times: list[float]
) -> list[str]:
    """One line of the table of filters."""
    later = f"{1e3 * statistics.median(times):.2f} / {1e3 * percentile(times, 99):.2f}"
    return [f"{100 * share:g} %", name, how, f"{recall(found, expected):.3f}", f"{1e3 * first:.1f}", later]


def opening(arguments: Any, vectors: Any, kinds: list[str]) -> str:
    """Time to open a store and find something, bytes on disk, and memory of a process that has it open."""
    count = len(vectors)
    rows = []
    for kind in kinds:
        path = store_path(arguments.work, kind, count)
        took = statistics.median(seconds(lambda path=path: reopened(path))[0] for _ in range(arguments.repeats))
        disk = sum(file.stat().st_size for file in path.parent.iterdir())
        resident = [
            int(subprocess.run([sys.executable, __file__, arguments.work, "--resident", path, mode], **CAPTURED).stdout)
            for mode in ("write", "read")
        ]
        per_million = 1e6 / count / 2**20
        sizes = [f"{size * per_million:,.0f}" for size in (disk, *resident)]
        rows.append([f"FaissStore, {kind}", f"{took:.2f}", *sizes])
    if not arguments.million:
        folder = arguments.work / "community"
        community(vectors, texts_of(count), metadatas_of(count)).save_local(str(folder))
        took = statistics.median(seconds(lambda: reopened_peer(folder))[0] for _ in range(arguments.repeats))
        disk = sum(file.stat().st_size for file in folder.iterdir())
        rows.append(["langchain-community, flat (pickle)", f"{took:.2f}", f"{disk * 1e6 / count / 2**20:,.0f}", "", ""])
    heads = ["system", "open and search once, s", "disk, MiB per million"]
    memory = ["memory, MiB per million", "memory read-only (shared map), MiB per million"]
    return table("Opening, and sizes", [*heads, *memory], rows)


CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "check": True}


def reopened(path: Path) -> None:
    """Open a store, search once, close it."""
    from langchain_llm2vec_gen import FaissStore

    with FaissStore(path) as store:
        store.similarity_search_by_vector([1.0] * DIMENSION, K)


def reopened_peer(folder: Path) -> None:
    """Load langchain-community's folder and search once."""
    from langchain_community.vectorstores import FAISS
    from langchain_core.embeddings import FakeEmbeddings

    store = FAISS.load_local(str(folder), FakeEmbeddings(size=DIMENSION), allow_dangerous_deserialization=True)
    store.similarity_search_by_vector([1.0] * DIMENSION, K)


def resident(path: str, mode: str) -> int:
    """Bytes of memory that an open store takes after some searches, without pages of files, which can be shared."""
    import numpy as np
    import psutil
    from langchain_llm2vec_gen import FaissStore

    def own() -> int:
        return sum(part.anonymous for part in psutil.Process().memory_maps())

    before = own()
    with FaissStore(path, read_only=mode == "read") as store:
        for query in np.random.default_rng(1).standard_normal((20, DIMENSION)):
            store.similarity_search_by_vector(query, K)
        return own() - before


def latencies(systems: dict[str, Callable[[Any], Any]], queries: Any) -> tuple[dict[str, list[float]], dict[str, list]]:
    """Seconds of each query, and what was found.

    Systems take turns every few queries, so that all see the same machine; after each turn the threads of the last
    system, which go on waiting for work for a moment, get time to fall asleep.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    found: dict[str, list] = {name: [] for name in systems}
    for start in range(0, len(queries), TURN):
        for name, search in systems.items():
            time.sleep(0.3 if len(systems) > 1 else 0.0)
            for query in queries[start : start + TURN]:
                took, result = seconds(lambda search=search, query=query: search(query))
                times[name].append(took)
                found[name].append(result)
    return times, found


def recall(found: list[set[int]], expected: list[set[int]]) -> float:
    """Share of the true nearest that were found."""
    return sum(len(one & other) / len(other) for one, other in zip(found, expected, strict=True)) / len(found)


def percentile(values: list[float], share: int) -> float:
    """A percentile."""
    return sorted(values)[min(len(values) - 1, round(share / 100 * len(values)))]


def table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"### {title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


if __name__ == "__main__":
    main()
