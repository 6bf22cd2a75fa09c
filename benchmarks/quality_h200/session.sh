#!/usr/bin/env bash
# Phases on the GPU machine, each to be run in the background; what they leave in /tmp/out is fetched
# by later calls. Usage: session.sh PHASE
# Before: this repository in /tmp/repo, the wheels of training in /tmp/site, those of speculators in
# /tmp/peers (see README.md), and /tmp/work/base and /tmp/work/data (`routing_h200/session.sh base`,
# for which `heads` waits); for `serve` vLLM unpacked in /tmp/v and /tmp/v/ready.
#   heads    trains and grafts all heads: HEADS (names, all by default), JOBS (5), SET (a setting)
#   serve    serves and measures them as they become ready: ENGINES (6), PROMPTS (400),
#            SECONDS_TO_SERVE (900)
#   measure  the tables of what has been measured so far
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=/tmp/out work=/tmp/work vllm=/tmp/v
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=2
note() { echo "$(date +%T) quality: $*" >> "$out/progress.txt"; }
wait_for() { # FILE SECONDS
  for ((i = 0; i < $2; i++)); do [ -e "$1" ] && return; sleep 1; done
  note "no $1 after $2 s"
}
heads() {
  wait_for "$work/data/data.json" 600
  PYTHONPATH=$root:/tmp/site:/tmp/peers python3 "$here/train_all.py" "$work" ${HEADS:-} \
    --jobs "${JOBS:-5}" ${SET:+--set "$SET"} > "$out/${LOG:-heads}.log" 2>&1
  note "heads: $?"
}
serve() {
  wait_for "$vllm/ready" 900
  wait_for "$work/data/data.json" 600
  . "$vllm/vllm-env.sh"
  PYTHONPATH=$root:/tmp/site:$PYTHONPATH python3 "$here/serve_all.py" "$work" ${HEADS:-} \
    --jobs "${ENGINES:-6}" --prompts "${PROMPTS:-400}" --seconds "${SECONDS_TO_SERVE:-900}" > "$out/served.log" 2>&1
  note "served: $?"
  measure
}
measure() {
  PYTHONPATH=$root:/tmp/site python3 "$here/summarize.py" "$work/served" "$out/quality.json" \
    > "$out/quality.md" 2>&1
  note "measured: $?"
  tar czf "$out/quality-logs.tar.gz" -C "$work" --exclude=plan.json logs served
}
"$@"
