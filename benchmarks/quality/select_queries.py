"""Choose the built-in models' training queries: sources whose licence allows commercial reuse, benchmarks left out.

python benchmarks/quality/select_queries.py QUERIES.jsonl.gz runs/queries.jsonl
python benchmarks/quality/select_queries.py QUERIES.jsonl.gz runs/later.jsonl --after 66     # parts not yet answered
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from llm2vec_gen_st.files import read_jsonl, write_rows
from llm2vec_gen_st.responses.store import plan_responses

# Licences as stated by each source; see the model card.
SOURCES = {
    "dolly": "CC BY-SA 3.0",
    "gpteacher_roleplay": "MIT",
    "gsm8k_train": "MIT",
    "medquad": "CC BY 4.0",
    "nl2bash": "Apache-2.0",
    "nq_open_dev": "Apache-2.0",
    "pubmedqa_labeled": "MIT",
    "query_wellformedness": "CC BY-SA 4.0",
    "self_instruct_seed": "Apache-2.0",
    "self_instruct_user_oriented": "Apache-2.0",
    "squad_v2_via_disflqa": "CC BY 4.0",
    "strategyqa_train": "MIT",
    "webquestions": "CC BY 4.0",
}
MAX_CHARACTERS = 600
PART = 128  # queries of a part of responses


def main(
    queries: Path,
    output: Path,
    after: Annotated[int, typer.Option(help="Leave out the queries of this many parts, as `respond` takes them.")] = 0,
) -> None:
    """Write the rows of the chosen sources, and print how many came from each."""
    rows = [row for row in read_jsonl(queries) if row["source"] in SOURCES and len(row["query"]) <= MAX_CHARACTERS]
    plan = plan_responses(rows, batch_size=PART)
    taken = {row["id"] for number in plan.order()[:after] for row in plan.batches[number]}
    rows = [row for position, row in enumerate(rows) if str(row.get("id", position)) not in taken]
    write_rows(output, rows)
    for source, count in sorted(Counter(row["source"] for row in rows).items()):
        print(f"{source:30} {count:6}  {SOURCES[source]}")
    print(f"{'total':30} {len(rows):6}")
    print(f"input  sha256 {hashlib.sha256(queries.read_bytes()).hexdigest()}")
    print(f"output sha256 {hashlib.sha256(output.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    typer.run(main)
