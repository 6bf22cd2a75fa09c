#!/usr/bin/env bash
# All cases on the GPU machine, most informative first, in at most LIMIT seconds (170).
# Usage: session.sh OUT. Cases append to OUT/cases.jsonl; one that fails or hangs does not stop the
# rest. A case imports while the ones before it run, and uses the GPU when its turn comes.
# Rehearsal on a CPU, SLOW times as long for each case:
# EXTRA="--tiny --tokens 128 --length 64 --steps 1" AHEAD=1 SLOW=5 LIMIT=900 session.sh OUT
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=$1 limit=${LIMIT:-170} ahead=${AHEAD:-4} slow=${SLOW:-1} extra=${EXTRA:-}
python=${PYTHON:-python3} site=${SITE:-/tmp/shapes-site} wheels=$root/.carry/shapes
turns=$(mktemp -d)
mkdir -p "$out"
note() { echo "$SECONDS s: $*" | tee -a "$out/progress.txt"; }

ours() { echo "$here/step.py --name $*"; }
theirs() { echo "$here/speculators_step.py --name $*"; }
# seconds that the case may take once it has the GPU | command
cases=(
  "30|$(ours main --accumulation 4 --profile "$out/main-kernels.txt")"
  "40|$(theirs speculators --eager --profile "$out/speculators-kernels.txt")"
  "20|$(ours one-row --tokens 4096 --steps 5)"
  "20|$(ours large --tokens 32768 --accumulation 2)"
  "20|$(ours one-row-checkpointing --tokens 4096 --checkpointing)"
  "20|$(ours ce --accumulation 4 --loss ce)"
  "20|$(ours e2e_tv --accumulation 4 --loss e2e_tv)"
  "25|$(ours plain-loss --accumulation 4 --plain-loss)"
  "25|$(ours before --tokens 4096 --experts grouped_mm --plain-loss --chunk-floats 268435456 \
    --steps 1)"
  "20|$(theirs speculators-fastest --eager --experts grouped_mm --weights bfloat16)"
  "30|$(theirs speculators-grouped --eager --experts grouped_mm)"
  "45|$(ours compiled --accumulation 4 --compile)"
  "20|$(ours small-chunks --accumulation 4 --chunk-floats 268435456)"
  "20|$(ours checkpointing --tokens 65536 --checkpointing)"
  "30|$(theirs speculators-8192 --eager --tokens 8192 --steps 1)"
  "20|$(ours large-chunks --accumulation 4 --chunk-floats 1073741824)"
  "90|$(theirs speculators-compiled --warm-up 2 --steps 1)"
)
pids=()
start() { # NUMBER: in the background, until its turn
  local number=$1
  [ "$number" -lt "${#cases[@]}" ] || return 0
  PYTHONPATH="$root:$site" $python ${cases[$number]#*|} --out "$out/cases.jsonl" \
    --turn "$turns/$number" $extra > "$out/case-$number.txt" 2>&1 &
  pids[$number]=$!
}

if compgen -G "$wheels/*.whl" > /dev/null; then
  $python -m pip install -q --no-index --no-deps --target "$site" "$wheels"/*.whl \
    > "$out/wheels.txt" 2>&1
  note "wheels: $?"
fi
for ((i = 0; i <= ahead; i++)); do start "$i"; done
(cd "$root" && PYTHONPATH=$root timeout $((40 * slow)) $python -m pytest -q -p no:cacheprovider \
  tests/unit/test_loss_kernels.py tests/unit/test_experts.py) > "$out/checks.txt" 2>&1
note "checks: $? $(tail -1 "$out/checks.txt")"
for ((i = 0; i < ${#cases[@]}; i++)); do
  name=$(sed 's/.*--name \([^ ]*\).*/\1/' <<< "${cases[$i]}")
  until=$((SECONDS + slow * ${cases[$i]%%|*}))
  [ "$until" -lt "$limit" ] || until=$limit
  [ "$SECONDS" -ge "$limit" ] || touch "$turns/$i"
  while kill -0 "${pids[$i]}" 2> /dev/null && [ "$SECONDS" -lt "$until" ]; do sleep 0.1; done
  kill -9 "${pids[$i]}" 2> /dev/null && note "$name: stopped"
  wait "${pids[$i]}" 2> /dev/null
  note "$name: exit $?"
  [ "$SECONDS" -lt "$limit" ] || break
  start $((i + ahead + 1))
done
for pid in "${pids[@]}"; do kill -9 "$pid" 2> /dev/null; done
rm -r "$turns"
$python "$here/table.py" "$out/cases.jsonl"
