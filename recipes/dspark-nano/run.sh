#!/usr/bin/env bash
# A DSpark draft for the base that recipes/nano/run.sh made. Usage: run.sh FOLDER (as for that one).
# STEPS=40 trains as many steps instead of the recipe's: enough to see that the line works.
set -euo pipefail
folder=${1:-build/nano}
mtp=${MTP:-mtp}
recipe=$(dirname "$0")/recipe.toml
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

run() {
  printf '\n$ mtp %s\n' "$*"
  "$mtp" "$@"
}

run train --draft dspark --base "$folder/base" --data "$folder/data" --recipe "$recipe" \
  --out "$folder/draft" --overwrite ${STEPS:+--set "train.steps=$STEPS"}
run eval --base "$folder/base" --draft "$folder/draft" --data "$folder/data" --recipe "$recipe" \
  --report "$folder/draft-eval.json"
