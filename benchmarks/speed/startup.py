"""Starting: what importing this package adds to importing its host, and how soon the built-in model is ready.

    python benchmarks/speed/startup.py

Every measurement is taken in a fresh process, turn by turn; files are in the page cache, and the built-in base model's
weights have been dequantized before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

from one_process import options, raw_arguments
from peers import in_turns, report, table, target, targets

HOST = "import sentence_transformers"
CLASS = "from llm2vec_gen_st import LLM2VecGen"
READY = f"{CLASS}; model = LLM2VecGen('llm2vec-gen-smollm2-135m', device='cpu')"
# Only what stands between the clocks is measured; a fresh interpreter, and what was done before, are not.
CASES = {
    "`import llm2vec_gen_st`": ("", "import llm2vec_gen_st"),
    "`import sentence_transformers`": ("", HOST),
    f"`{CLASS}`": ("", CLASS),
    f"`{CLASS}`, after `import sentence_transformers`": (HOST, CLASS),
    "built-in model, after the imports": (CLASS, READY),
    "built-in model and its first vector, after the imports": (CLASS, f"{READY}; model.encode('Who makes honey?')"),
}


def fresh(before: str, measured: str) -> dict[str, Any]:
    """Seconds that code takes in a process of its own."""
    code = f"import json, time\n{before}\nstart = time.perf_counter()\n{measured}\n"
    code += "print(json.dumps({'seconds': time.perf_counter() - start}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    """Measure, and print and write the tables."""
    given = options(__doc__ or "", "startup").parse_args()
    threads = str(given.threads)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    os.environ.update(environment)
    for before, measured in CASES.values():
        fresh(before, measured)
    runs = in_turns({name: (lambda case=case: fresh(*case)) for name, case in CASES.items()}, given.repeats)
    found = {name: median(run["seconds"] for run in times) for name, times in runs.items()}
    host, own, added, ready = (found[name] for name in list(CASES)[1:5])
    report(
        given.output,
        [
            f"Fresh processes, {given.threads} threads, median of {given.repeats}.",
            table(["what", "seconds"], [[name, f"{took:.3f}"] for name, took in found.items()]),
            targets(
                [
                    target("the class's import, beyond the host's, s", own - host, 0.3, at_most=True),
                    target("the class's import after the host's, s", added, 0.3, at_most=True),
                    target("built-in model ready, after the imports, s", ready, 4, at_most=True),
                ]
            ),
        ],
        {"arguments": raw_arguments(given), "runs": runs},
    )


if __name__ == "__main__":
    main()
