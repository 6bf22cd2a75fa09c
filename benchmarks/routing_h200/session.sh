#!/usr/bin/env bash
# Everything on the GPU machine, in the background; what it leaves in /tmp/out is fetched by later
# calls. Usage: `session.sh trained` and, beside it, `session.sh others`. With a second GPU give each
# its own CUDA_VISIBLE_DEVICES and set SECOND=1: then `others` does what else needs quiet.
# Before: the repository in /tmp/repo, the wheels of training in /tmp/site; vLLM unpacked in /tmp/v,
# after which /tmp/v/ready is made.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=/tmp/out work=/tmp/work served=/tmp/served vllm=/tmp/v
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
trained() {
  (with_vllm; wait_for "$work/grafted" 1500; verify) &
  (
    export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1
    note training
    bash "$here/train.sh" "$work" /tmp/code > "$out/train.log" 2>&1
    note "trained: $?"
  )
  with_vllm
  wait_for "$work-rehearsal/rehearsed" 60
  SECONDS_TO_START=150 bash "$here/serve.sh" "$work" "$vllm" "$served" > "$out/serve.log" 2>&1
  note serving
  python3 "$here/acceptance.py" "$served/rounds" "$out/acceptance.json" 3 64 \
    > "$out/acceptance.log" 2>&1
  note "acceptance: $?"
  # Their memory and threads would be in the way of timing, and so would be these.
  python3 "$here/engines.py" stop "$served/rounds" stock-eager routed-eager nvfp4-stock nvfp4-routed
  wait_for "$out/verify-off.txt.done" 60
  for part in 0 1 2; do # results early, in parts
    timing "$served/rounds" "timing-$part" "${TIMING:-110}"
  done
  python3 "$here/engines.py" stop "$served/rounds"
  [ -n "${SECOND:-}" ] || quiet
}
timing() { # ROUNDS NAME SECONDS
  python3 "$here/timing.py" "$1" "$out/$2.json" "$3" > "$out/$2.log" 2>&1
  note "$2: $?"
}
quiet() { # what else needs a GPU without neighbours
  python3 "$here/variants.py" shape /tmp/shape "$vllm/edits" > "$out/shape.log" 2>&1
  python3 "$here/engines.py" start /tmp/shape/rounds 200 >> "$out/shape.log" 2>&1
  note shape
  timing /tmp/shape/rounds shape-timing "${SHAPE:-130}"
  for name in plain stock routed edited routed-compiled; do
    cp "/tmp/shape/rounds/$name/log.txt" "$out/shape-$name.txt"
  done
  python3 "$here/engines.py" stop /tmp/shape/rounds
}
others() {
  with_vllm
  bash "$here/edits.sh" "$vllm" > "$out/edits.log" 2>&1
  note "edited: $?"
  (
    bash "$here/rehearse.sh" "$work" /tmp/code "$vllm" "$served" > "$out/rehearse.log" 2>&1
    note "rehearsal: $?"
  ) &
  (cd "$root" && CUDA_VISIBLE_DEVICES=${BOTH:-0} MTP_GPU_REPORT=$out/cases.jsonl \
    MTP_GPU_TIME_LIMIT=300 python3 -m pytest -p no:cacheprovider -n "${CASES:-6}" tests/gpu \
    > "$out/cases.log" 2>&1)
  note "cases: $?"
  wait
  [ -z "${SECOND:-}" ] || quiet
}
verify() { # both verdicts, each by its exit code; beside training, so with little memory
  printf '#!/bin/sh\nexport PYTHONPATH=%s VLLM_USE_FLASHINFER_SAMPLER=0\nexec python3 "$@"\n' \
    "$PYTHONPATH" > "$vllm/python"
  chmod +x "$vllm/python"
  options='{"gdn_prefill_backend": "triton", "attention_backend": "TRITON_ATTN",
            "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2000000000,
            "kernel_config": {"enable_jit_warmup": false}}'
  for switch in on off; do
    MTP_GRAFT_ROUTING=$switch python3 -m mtp.cli verify "$work/grafted" --base "$work/base" \
      --vllm --vllm-python "$vllm/python" --data "$work/data" --engine-options "$options" \
      > "$out/verify-$switch.txt" 2>&1
    code=$?
    echo "exit code $code" >> "$out/verify-$switch.txt"
    note "verify, routing $switch: $code"
    touch "$out/verify-$switch.txt.done"
  done
}
"$@"
