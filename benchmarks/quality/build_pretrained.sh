#!/usr/bin/env bash
# Makes the two built-in adapters and every figure about them, from a folder with queries/ and eval/.
#     bash benchmarks/quality/build_pretrained.sh DATA WORK
# Each step goes on where it was stopped. For the shipped adapters `respond` was stopped after 66 of its 118 parts, which
# are written in an order fixed in advance; hence --partial. One of them went on later with other parts: see README.md.
set -euo pipefail
data=$1 work=$2
here=$(dirname "$0")
base=HuggingFaceTB/SmolLM2-135M-Instruct
mkdir -p "$work"

python "$here/select_queries.py" "$data/queries/train_mix.jsonl.gz" "$work/queries.jsonl" | tee "$work/queries.txt"
llm2vec-gen respond "$work/queries.jsonl" --output "$work/responses" --model $base --dtype bfloat16 \
    --batch-size 128 --max-new-tokens 64
for pair in "smollm2-135m all-MiniLM-L6-v2" "smollm2-135m-self self"; do
    set -- $pair
    student="$work/students/llm2vec-gen-$1"
    llm2vec-gen train "$work/responses" --output "$student" --base $base --recipe "$1" --teacher "$2" --partial \
        2>&1 | tee "$work/train-$1.log"
    python "$here/decodability.py" "$student" "$work/responses" --output "$here/results/decodability-$1.json"
    python "$here/install_pretrained.py" "$student" "llm2vec-gen-$1"
done
for split in dev test; do
    python "$here/evaluate.py" "$data/eval" --split $split --output "$here/results/$split.json"
done
