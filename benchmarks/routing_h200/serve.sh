#!/usr/bin/env bash
# Start the engines of all variants of what WORK holds. Usage: serve.sh WORK VLLM SERVED
set -euo pipefail
work=$1 vllm=$2 served=$3
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$(cd "$here/../.." && pwd):${PYTHONPATH:-} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
mkdir -p "$served"
for name in data grafted grafted-nvfp4 quantize.json; do ln -sfn "$work/$name" "$served/$name"; done
python3 "$here/variants.py" "$served" "$vllm/edited"
python3 "$here/rounds.py" start "$served/rounds" "${SECONDS_TO_START:-400}"
