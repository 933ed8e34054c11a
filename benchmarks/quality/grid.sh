#!/usr/bin/env bash
# The paper's ablations on SmolLM2-135M, small but real: 600 queries, responses of at most 64 tokens, 45 + 40 steps a run.
#     bash benchmarks/quality/grid.sh DATA WORK
# Writes WORK/grid/table.md, table.csv and a figure for each axis. Each step goes on where it was stopped.
set -euo pipefail
data=$1 work=$2
here=$(dirname "$0")
base=HuggingFaceTB/SmolLM2-135M-Instruct
mkdir -p "$work"

python "$here/select_queries.py" "$data/queries/train_mix.jsonl.gz" "$work/selected.jsonl"
head -n 600 "$work/selected.jsonl" > "$work/queries.jsonl"
llm2vec-gen respond "$work/queries.jsonl" --output "$work/responses" --model $base --dtype bfloat16 \
    --batch-size 64 --max-new-tokens 64
llm2vec-gen grid "$work/responses" --output "$work/grid" --recipe smollm2-135m --teacher all-MiniLM-L6-v2 --set whitening=0 \
    --set held_out=100 --set max_steps=45 --set recon_steps=40 --set warmup_steps=5 --set save_steps=15 \
    --vary suffix=2,10,20,40 --vary losses=both,alignment,reconstruction --vary teacher=all-MiniLM-L6-v2,self
