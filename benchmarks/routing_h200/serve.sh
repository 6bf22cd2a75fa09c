#!/usr/bin/env bash
# Start the engines of what WORK holds (train.sh). Usage: serve.sh WORK VLLM SERVED [NAME...]
# vLLM keys its compile caches by the checkpoint's path, hence SERVED, a folder of links: the
# rehearsal and the real thing stand in the same place. VLLM: where vLLM was unpacked.
set -euo pipefail
work=$1 vllm=$2 served=$3
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$(cd "$here/../.." && pwd):${PYTHONPATH:-} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
mkdir -p "$served"
rm -f "$served/quantize.json"
for name in data grafted grafted-nvfp4 quantize.json; do [ ! -e "$work/$name" ] || ln -sfn "$work/$name" "$served/$name"; done
python3 "$here/variants.py" trained "$served" "$vllm/edits"
python3 "$here/engines.py" start "$served/rounds" "${SECONDS_TO_START:-400}" "${@:4}"
