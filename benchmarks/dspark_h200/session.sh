#!/usr/bin/env bash
# Phases on the GPU machine, in the background; /tmp/out is fetched by later calls. Before: the
# repository in /tmp/repo, the wheels of training in /tmp/site, vLLM 0.33 unpacked in /tmp/v (as for
# routing_h200/session.sh). Usage: session.sh PHASE...; WORK is /tmp/work unless set.
#   train    the draft (and the base and data, unless they are there)
#   engines, draft-engine   what the table asks: the MTP head in WORK/grafted, for which it waits; the draft
#   predict  what `mtp eval` says of the head, on the table's prompts
#   table    beside each other, while nothing else runs
#   deploy   the deploy command by `vllm serve`
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=/tmp/out work=${WORK:-/tmp/work} vllm=/tmp/v
mkdir -p "$out"
note() { echo "$(date +%T) $*" >> "$out/progress.txt"; }
wait_for() { # FILE
  for ((i = 0; i < 1200; i++)); do [ -e "$1" ] && return; sleep 1; done
  note "no $1"
}
with_vllm() {
  wait_for "$vllm/ready"
  . "$vllm/vllm-env.sh"
  export PYTHONPATH=$root:/tmp/site:$PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
  export VLLM_NO_USAGE_STATS=1
}
train() {
  PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1 bash "$here/train.sh" "$work" /tmp/code \
    > "$out/dspark-train.log" 2>&1
  note "draft trained: $?"
  for name in draft-eval.json draft/history.jsonl draft/config.json; do
    cp "$work/$name" "$out/dspark-$(basename "$name")"
  done
}
engines() {
  wait_for "$work/grafted/config.json"
  (with_vllm; python3 "$here/table.py" plan "$work"
   start_engines plain stock routed > "$out/dspark-engines.log" 2>&1
   note "table's engines: $?")
}
draft-engine() {
  wait_for "$work/table/variants.json"
  (with_vllm
   for name in dspark dspark-auto dspark-eager; do # the first that starts
     start_engines $name > "$out/$name-engine.log" 2>&1
     note "draft's engine $name: $?"
     [ ! -e "$work/table/$name/ready.json" ] || break
   done)
}
start_engines() {
  python3 "$here/../routing_h200/engines.py" start "$work/table" "${SECONDS_TO_START:-600}" "$@"
}
predict() {
  wait_for "$work/grafted/config.json"
  for runtime in routed stock; do
    PYTHONPATH=$root:/tmp/site python3 -m mtp.cli eval --base "$work/base" --head "$work/head" \
      --data "$work/data" --recipe "$here/recipe.toml" --runtime $runtime \
      --report "$work/eval-$runtime.json" > "$out/eval-$runtime.log" 2>&1
    note "predicted $runtime: $?"
    cp "$work/eval-$runtime.json" "$out"
  done
}
table() {
  (with_vllm
   WARM_UP=${WARM_UP:-20} python3 "$here/table.py" measure "$work" "$out/dspark-table" "${SPEED:-90}" \
     > "$out/dspark-table.log" 2>&1
   note "dspark table: $?"
   python3 "$here/../routing_h200/engines.py" stop "$work/table")
}
deploy() {
  wait_for "$work/draft-eval.json"
  (with_vllm; python3 "$here/deploy.py" "$work" "$out/${DEPLOY:-dspark-deploy}.json" \
     > "$out/${DEPLOY:-dspark-deploy}.log" 2>&1
   note "${DEPLOY:-dspark-deploy}: $?")
}
for phase in "$@"; do "$phase"; done
