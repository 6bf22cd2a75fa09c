#!/usr/bin/env bash
# Everything on two GPUs, in the background: `session.sh trained` on the first, `session.sh others` on
# the second. Each part leaves its results and logs in /tmp/out, from where later calls take them.
# Before: the repository in /tmp/repo, vLLM unpacked in /tmp/v, the wheels of training in /tmp/site.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=/tmp/out work=/tmp/work served=/tmp/served vllm=/tmp/v
mkdir -p "$out"
note() { echo "$(date +%T) $*" >> "$out/progress.txt"; }
with_vllm() { # the environment of vLLM, once it is there
  until [ -e "$vllm/ready" ]; do sleep 1; done
  . "$vllm/vllm-env.sh"
  export PYTHONPATH=$root:/tmp/site:$PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
  export VLLM_NO_USAGE_STATS=1
}
trained() {
  export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1
  note training
  bash "$here/train.sh" "$work" /tmp/code > "$out/train.log" 2>&1
  note "trained: $?"
  with_vllm
  for ((i = 0; i < 90; i++)); do [ -e "$work-rehearsal/rehearsed" ] && break; sleep 1; done
  SECONDS_TO_START=150 bash "$here/serve.sh" "$work" "$vllm" "$served" > "$out/serve.log" 2>&1
  note serving
  python3 "$here/acceptance.py" "$served/rounds" "$out/acceptance.json" 4 64 \
    > "$out/acceptance.log" 2>&1
  note "acceptance: $?"
  # Their memory and threads would be in the way of timing.
  python3 "$here/engines.py" stop "$served/rounds" stock-eager routed-eager nvfp4-stock nvfp4-routed
  sleep 2
  for ((part = 0; part < 4; part++)); do # results early, in parts
    python3 "$here/timing.py" "$served/rounds" "$out/timing-$part.json" "${TIMING:-110}" \
      > "$out/timing-$part.log" 2>&1
    note "timing $part: $?"
  done
}
others() {
  with_vllm
  bash "$here/edits.sh" "$vllm" > "$out/edits.log" 2>&1
  note "edited: $?"
  bash "$here/rehearse.sh" "$work" /tmp/code "$vllm" "$served" > "$out/rehearse.log" 2>&1 &
  rehearsal=$!
  (cd "$root" && MTP_GPU_REPORT=$out/cases.jsonl CUDA_VISIBLE_DEVICES=$BOTH python3 -m pytest \
    -p no:cacheprovider -n "${CASES:-7}" tests/gpu > "$out/cases.log" 2>&1)
  note "cases: $?"
  wait $rehearsal
  note "rehearsal: $?"
  python3 "$here/variants.py" shape /tmp/shape "$vllm/edits" > "$out/shape.log" 2>&1
  python3 "$here/engines.py" start /tmp/shape/rounds 240 >> "$out/shape.log" 2>&1
  note shape
  python3 "$here/timing.py" /tmp/shape/rounds "$out/shape-timing.json" "${SHAPE:-240}" \
    > "$out/shape-timing.log" 2>&1
  note "shape timing: $?"
  python3 "$here/engines.py" stop /tmp/shape/rounds
  until [ -e "$work/finished" ]; do sleep 1; done
  verify
  for name in stock routed edited routed-compiled; do
    python3 "$here/profile_step.py" "$served/rounds" $name "$out/profile-$name.json" \
      > "$out/profile-$name.log" 2>&1
    note "profile $name: $?"
  done
}
verify() { # both verdicts, each by its exit code
  printf '#!/bin/sh\nexport PYTHONPATH=%s VLLM_USE_FLASHINFER_SAMPLER=0\nexec python3 "$@"\n' \
    "$PYTHONPATH" > "$vllm/python"
  chmod +x "$vllm/python"
  options='{"gdn_prefill_backend": "triton", "gpu_memory_utilization": 0.3,
            "kernel_config": {"enable_jit_warmup": false}}'
  for switch in on off; do
    MTP_GRAFT_ROUTING=$switch python3 -m mtp.cli verify "$work/grafted" --base "$work/base" \
      --vllm --vllm-python "$vllm/python" --data "$work/data" --engine-options "$options" \
      > "$out/verify-$switch.txt" 2>&1
    code=$?
    echo "exit code $code" >> "$out/verify-$switch.txt"
    note "verify, routing $switch: $code"
  done
}
"$@"
