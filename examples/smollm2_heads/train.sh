#!/usr/bin/env bash
# Makes the heads of this folder's README from nothing: prompts, the model's own answers to them, training.
# bash train.sh MODEL OUT, with spec-plugins[train] and vLLM installed; VLLM_PYTHON names vLLM's Python where that
# is another. May be interrupted and run again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$1 out=$2
mkdir -p "$out"
test -e "$out/prompts.jsonl" || python "$here/prompts.py" "$out/prompts.jsonl" --count "${COUNT:-2560}"
"${VLLM_PYTHON:-python}" "$here/answers.py" "$model" "$out/prompts.jsonl" "$out/traffic.jsonl"
common=(--model "$model" --data "$out/traffic.jsonl" --features "$out/features" --batch-tokens 1536 --epochs 3)
test -e "$out/eagle3" || spec-plugins train eagle3 "${common[@]}" --out "$out/eagle3" --draft-vocab-size 6144 --positions 3
test -e "$out/medusa" || spec-plugins train medusa "${common[@]}" --out "$out/medusa" --draft-vocab-size 6144 --positions 4
test -e "$out/draft" || spec-plugins train draft "${common[@]}" --out "$out/draft" --draft-vocab-size 6144 --learning-rate 2e-3
