#!/usr/bin/env bash
# Everything on the GPU machine, in the background; /tmp/out is fetched by later calls. Before: the
# repository in /tmp/repo, the wheels of training in /tmp/site; vLLM 0.33 unpacked in /tmp/v, after
# which /tmp/v/ready is made (as for routing_h200/session.sh).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=/tmp/out work=/tmp/work vllm=/tmp/v
mkdir -p "$out"
note() { echo "$(date +%T) $*" >> "$out/progress.txt"; }
(
  export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1
  bash "$here/train.sh" "$work" /tmp/code > "$out/dspark-train.log" 2>&1
  note "draft trained: $?"
)
cp "$work/draft-eval.json" "$work/draft/history.jsonl" "$work/draft/config.json" "$out/"
for ((i = 0; i < 900; i++)); do [ -e "$vllm/ready" ] && break; sleep 1; done
. "$vllm/vllm-env.sh"
export PYTHONPATH=$root:/tmp/site:$PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1
python3 "$here/table.py" "$work" "$out/dspark-table" > "$out/dspark-table.log" 2>&1
note "dspark table: $?"
