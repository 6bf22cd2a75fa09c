#!/usr/bin/env bash
# The whole line on a small real model. Each stage is a command of its own; this file runs them in
# order and prints each one. Usage: run.sh FOLDER
set -euo pipefail
folder=${1:-build/nano}
mtp=${MTP:-mtp}
vllm_python=${VLLM_PYTHON:?name the python of an environment that has vLLM}
recipe=$(dirname "$0")/recipe.toml
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
started=$SECONDS
mkdir -p "$folder"
rm -f "$folder/served.json"  # the mark of a finished demo

run() {
  printf '\n$ mtp %s\n' "$*"
  "$mtp" "$@"
}

run nano traces --out "$folder/traces.jsonl"
run nano code --out "$folder/code" --overwrite
run nano base --traces "$folder/traces.jsonl" --code "$folder/code" \
  --out "$folder/base" --overwrite
run data prepare --base "$folder/base" --source "$folder/traces.jsonl" --source "$folder/code" \
  --licence PSF-2.0 --max-length 1024 --out "$folder/data" --overwrite
run train --base "$folder/base" --data "$folder/data" --recipe "$recipe" \
  --out "$folder/head" --overwrite
run eval --base "$folder/base" --head "$folder/head" --data "$folder/data" --recipe "$recipe" \
  --report "$folder/eval.json"
run eval --base "$folder/base" --head "$folder/head" --data "$folder/data" --recipe "$recipe" \
  --runtime stock --report "$folder/eval-stock.json"
run quantize --head "$folder/head" --base "$folder/base" --data "$folder/data" \
  --recipe "$recipe" --out "$folder/head-nvfp4" --report "$folder/quantize.json" --overwrite
run graft --base "$folder/base" --head "$folder/head" --out "$folder/grafted" --overwrite
run verify "$folder/grafted" --base "$folder/base"
run graft --base "$folder/base" --head "$folder/head-nvfp4" --out "$folder/grafted-nvfp4" \
  --overwrite
run verify "$folder/grafted-nvfp4" --base "$folder/base"

# vLLM has no NVFP4 kernels for a CPU: there, the dequantized twin of the NVFP4 head is served.
run quantize --dequantize --head "$folder/head-nvfp4" --out "$folder/head-nvfp4-twin" --overwrite
run graft --base "$folder/base" --head "$folder/head-nvfp4-twin" \
  --out "$folder/grafted-nvfp4-twin" --overwrite

run probe --vllm-python "$vllm_python" --data "$folder/data" --recipe "$recipe" \
  --checkpoint "BF16=$folder/grafted" --predicted "BF16=$folder/eval.json" \
  --predicted "BF16=$folder/eval-stock.json" \
  --checkpoint "NVFP4 twin=$folder/grafted-nvfp4-twin" \
  --predicted "NVFP4 twin=$folder/quantize.json" \
  --report "$folder/served.json"
printf '\ndemo finished in %d s\n' $((SECONDS - started))
