#!/usr/bin/env bash
# A head of two steps through everything, while the real one trains: finds failures early and fills
# the compile caches. vLLM keys them by the checkpoint's path, hence SERVED, a folder of links.
# Usage: rehearse.sh WORK CODE VLLM SERVED (WORK, CODE as for train.sh; VLLM: unpacked there)
set -euo pipefail
work=$1 code=$2 vllm=$3 served=$4
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$(cd "$here/../.." && pwd):${PYTHONPATH:-} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
rehearsal=$work-rehearsal
mkdir -p "$rehearsal"
cat > "$rehearsal/recipe.toml" <<'TOML'
[head]
num_layers = 4
warm_start = "last"
[train]
steps = 2
tokens_per_batch = 32768
[eval]
num_prompts = 8
max_prompt_tokens = 256
num_tokens = 16
[quantize]
calibration_tokens = 65536
TOML
until [ -e "$work/data" ]; do sleep 1; done
ln -sfn "$work/base" "$rehearsal/base"
ln -sfn "$work/data" "$rehearsal/data"
touch "$rehearsal/traces.jsonl"
RECIPE=$rehearsal/recipe.toml bash "$here/train.sh" "$rehearsal" "$code"
bash "$here/serve.sh" "$rehearsal" "$vllm" "$served"
python3 "$here/acceptance.py" "$served/rounds" "$rehearsal/acceptance.json" 1 64
python3 "$here/timing.py" "$served/rounds" "$rehearsal/timing.json" 15
python3 "$here/engines.py" stop "$served/rounds"
mv "$served/rounds" "$rehearsal/rounds"
touch "$rehearsal/rehearsed"
