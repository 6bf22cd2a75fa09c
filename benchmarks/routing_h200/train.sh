#!/usr/bin/env bash
# On the GPU machine: the hybrid base and its head by the project's own commands, nothing carried.
# Usage: train.sh WORK CODE (CODE: a folder of Python source for the base)
set -euo pipefail
work=$1 code=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
recipe=${RECIPE:-$root/recipes/hybrid/recipe.toml}
export PYTHONPATH="$root:${PYTHONPATH:-}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
mtp() { printf '\n$ mtp %s\n' "$*"; local t=$SECONDS; python3 -m mtp.cli "$@"; echo "[$((SECONDS - t)) s]"; }
mkdir -p "$work"
mtp nano traces --out "$work/traces.jsonl" --conversations "${CONVERSATIONS:-2000}"
mtp nano base --traces "$work/traces.jsonl" --code "$code" --recipe "$recipe" --out "$work/base" --overwrite
mtp data prepare --base "$work/base" --source "$work/traces.jsonl" --source "$code" \
  --licence "see the packages" --max-length 1024 --max-skip 0.05 --out "$work/data" --overwrite
mtp train --base "$work/base" --data "$work/data" --recipe "$recipe" --out "$work/head" --overwrite
mtp eval --base "$work/base" --head "$work/head" --data "$work/data" --recipe "$recipe" --report "$work/eval.json"
mtp quantize --head "$work/head" --base "$work/base" --data "$work/data" --recipe "$recipe" \
  --out "$work/head-nvfp4" --report "$work/quantize.json" --overwrite
mtp graft --base "$work/base" --head "$work/head" --out "$work/grafted" --overwrite
mtp graft --base "$work/base" --head "$work/head-nvfp4" --out "$work/grafted-nvfp4" --overwrite
mtp verify "$work/grafted-nvfp4" --base "$work/base"
