#!/usr/bin/env bash
# Phases of a session on the GPU machine, each to be run in the background; what they leave in
# /tmp/out is fetched by later calls. Usage: session.sh PHASE...
# Before: this repository in /tmp/repo, the wheels of training in /tmp/site; vLLM unpacked in /tmp/v,
# after which /tmp/v/ready is made.
#   base       the hybrid base and its data            (/tmp/work/base, /tmp/work/data)
#   head       its routed head, BF16 and NVFP4         (/tmp/work/grafted*)
#   cases      pytest of what needs CUDA or this vLLM
#   compiled   the cases with CUDA graphs, with each MTP layer compiled for its index
#   engines    those of the 35B's shape: overhead at one request, each variant twice
#   overhead   their timing
#   calls      how often the plugin's Python runs in a decode step
#   pause, resume  the training and serving of quality_h200
#   speed      tokens per second of the hybrid: plain, stock, routed
#   acceptance all variants of the hybrid, with intervals
#   verify     the routing proof, on and off
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=/tmp/out work=${WORK:-/tmp/work} served=/tmp/served vllm=/tmp/v shape=/tmp/shape
mkdir -p "$out"
note() { echo "$(date +%T) $*" >> "$out/progress.txt"; }
wait_for() { # FILE SECONDS
  for ((i = 0; i < $2; i++)); do [ -e "$1" ] && return; sleep 1; done
  note "no $1 after $2 s"
}
with_vllm() { # the environment of vLLM, once it is there
  wait_for "$vllm/ready" 900
  . "$vllm/vllm-env.sh"
  export PYTHONPATH=$root:/tmp/site:$PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
  export VLLM_NO_USAGE_STATS=1
}
logged() { # NAME COMMAND...: its output in /tmp/out/NAME.log, its exit code among the notes
  local name=$1 t=$SECONDS; shift
  "$@" > "$out/$name.log" 2>&1
  note "$name: $? after $((SECONDS - t)) s"
}
train() { PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1 bash "$here/train.sh" "$work" /tmp/code; }
base() { UNTIL=data logged base train; }
head() { logged head train; }
edits() { logged edits bash "$here/edits.sh" "$vllm"; }
cases() {
  (with_vllm; cd "$root"; MTP_GPU_REPORT=$out/cases.jsonl MTP_GPU_TIME_LIMIT=450 \
    logged cases python3 -m pytest -p no:cacheprovider -n "${CASES:-6}" tests/gpu \
    tests/unit/test_loss_kernels.py)
}
compiled() {
  (with_vllm; cd "$root"; [ -e "$vllm/edits/compiled" ] || edits
   export PYTHONPATH=$vllm/edits/compiled:$PYTHONPATH
   MTP_GPU_REPORT=$out/cases-compiled.jsonl MTP_GPU_TIME_LIMIT=450 logged cases-compiled \
     python3 -m pytest -p no:cacheprovider -n 4 tests/gpu/test_model_runner_v2.py -k graphs)
}
engines() {
  (with_vllm
   [ -e "$vllm/edits/compiled" ] || edits
   logged shape python3 "$here/variants.py" shape "$shape" "$vllm/edits"
   logged engines python3 "$here/engines.py" start "$shape/rounds" "${SECONDS_TO_START:-400}" \
     routed edited routed-again edited-again routed-compiled)
}
calls() {
  (with_vllm
   logged calls-engine python3 "$here/engines.py" start "$shape/rounds" \
     "${SECONDS_TO_START:-400}" counted
   logged calls python3 "$here/calls.py" "$shape/rounds" "$out/calls.json"
   python3 "$here/engines.py" stop "$shape/rounds" counted)
}
overhead() {
  (with_vllm
   logged overhead python3 "$here/timing.py" "$shape/rounds" "$out/overhead.json" \
     "${OVERHEAD:-150}" ${CONCURRENCY:-1}
   cp "$shape/rounds/routed/log.txt" "$out/shape-routed.txt"
   python3 "$here/engines.py" stop "$shape/rounds")
}
speed() {
  (with_vllm
   logged serve bash "$here/serve.sh" "$work" "$vllm" "$served" plain stock routed
   logged speed python3 "$here/timing.py" "$served/rounds" "$out/speed.json" "${SPEED:-150}"
   python3 "$here/engines.py" stop "$served/rounds")
}
acceptance() {
  (with_vllm
   logged serve bash "$here/serve.sh" "$work" "$vllm" "$served"
   logged acceptance python3 "$here/acceptance.py" "$served/rounds" "$out/acceptance.json" 3 64
   python3 "$here/engines.py" stop "$served/rounds")
}
verify() { # both verdicts, each by its exit code
  (with_vllm
   printf '#!/bin/sh\nexport PYTHONPATH=%s VLLM_USE_FLASHINFER_SAMPLER=0\nexec python3 "$@"\n' \
     "$PYTHONPATH" > "$vllm/python"
   chmod +x "$vllm/python"
   options='{"gdn_prefill_backend": "triton", "attention_backend": "TRITON_ATTN",
             "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2000000000,
             "kernel_config": {"enable_jit_warmup": false}}'
   for switch in on off; do
     MTP_GRAFT_ROUTING=$switch logged "verify-$switch" python3 -m mtp.cli verify "$work/grafted" \
       --base "$work/base" --vllm --vllm-python "$vllm/python" --data "$work/data" \
       --engine-options "$options"
   done)
}
# `pgrep -f` in a device call finds the call itself, whose text holds the pattern: so it stands here.
signal_training() { # STOP or CONT, for a timing that needs quiet
  local pid group own=$(ps -o pgid= -p $$)
  for pid in $(pgrep -f "${TRAINING:-serve_head.py|train_all.py|mtp.cli|speculators}"); do
    group=$(ps -o pgid= -p "$pid")
    # An engine's group holds its worker; the group of whoever asks holds what wants the quiet.
    if [ "$group" = "$own" ]; then kill "-$1" "$pid"; else kill "-$1" -- "-${group// /}"; fi
  done
}
pause() { signal_training STOP; }
resume() { signal_training CONT; }
for phase in "$@"; do "$phase"; done
