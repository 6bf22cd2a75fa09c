#!/usr/bin/env bash
# The benchmarks of the other folders as one session, in the background; /tmp/out is fetched by later
# calls. On two GPUs for half an hour, where what is timed has GPU 1 and cores of its own (zero, one),
# or on one for a quarter of an hour (single) or half an hour (rest, draft).
# Usage: session.sh LANE (STEPS: of each head, the recipe's otherwise), after install.sh; vLLM comes to /tmp/v by later calls, then /tmp/v/ready.
#   zero    GPU 0: data, heads, the DSpark draft, all that is served without a clock
#   one     GPU 1: training at the 35B's shapes; both GPUs; tokens per second; the draft's table
#   single  heads, tokens per second while all else stands still, then acceptance
#   rest    heads of as many steps as speculators'; losses; the draft beside the
#           head; with OWN_ROWS=9000 heads that learn from the base's own answers, with
#           PAIR_PROMPTS=4500 NVFP4 experts on much text
#   draft   the draft beside the MTP head first, then what fills the time
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
benchmarks=$(cd "$here/.." && pwd)
out=/tmp/out work=/tmp/work hybrid=/tmp/hybrid head=${HEAD:-routed-kl}  # the head that the table and algorithms take
cd "$benchmarks/.."  # each device call replaces the tree that it starts in, under what runs there
cores_zero=${CORES_ZERO:-12-27} cores_one=${CORES_ONE:-0-11}
mkdir -p "$out" "$work" "$hybrid"
note() { echo "$(date +%T) two: $*" >> "$out/progress.txt"; }
wait_for() { # FILE SECONDS
  for ((i = 0; i < $2; i++)); do [ -e "$1" ] && return; sleep 1; done
  note "no $1 after $2 s"
}
routed() { bash "$benchmarks/routing_h200/session.sh" "$@"; }
quality() { bash "$benchmarks/quality_h200/session.sh" "$@"; }
dspark() { bash "$benchmarks/dspark_h200/session.sh" "$@"; }
links() { # what routing_h200 and dspark_h200 take for their own
  wait_for "$work/grafted/$head@base" 1200
  for name in base data draft draft-eval.json; do ln -sfn "$work/$name" "$hybrid/$name"; done
  ln -sfn "$work/heads/$head" "$hybrid/head"
  ln -sfn "$work/logs/$head-experts-nvfp4.json" "$hybrid/quantize.json"
  ln -sfn "$work/grafted/$head@base" "$hybrid/grafted"
}
with_vllm() {
  wait_for /tmp/v/ready 900
  . /tmp/v/vllm-env.sh
  export PYTHONPATH=$benchmarks/..:/tmp/site:$PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
  export VLLM_NO_USAGE_STATS=1
}

zero() {
  export CUDA_VISIBLE_DEVICES=0
  routed base
  touch "$out/data-ready"
  HEADS="speculators-post routed-kl stock-kl speculators-post-1e-4 routed-kl-experts-nvfp4
    routed-kl-nvfp4 warm-start speculators-pre" JOBS=6 quality heads &
  dspark train &
  CASES=5 routed cases &
  SECONDS_TO_SERVE=${SERVE:-1350} ENGINES=6 quality serve &
  algorithms &
  pairs &
  wait
  note "zero: done"
}
algorithms() {
  wait_for "$work/grafted/$head@base" 1200
  (export PYTHONPATH=$benchmarks/..:/tmp/site
   sed "s/^num_prompts = .*/num_prompts = ${ALGORITHM_PROMPTS:-64}/" \
     "$benchmarks/../recipes/hybrid/recipe.toml" > /tmp/algorithms.toml
   python3 "$benchmarks/quantize/algorithms.py" --base "$work/base" --data "$work/data" \
     --head "$work/heads/$head" --recipe /tmp/algorithms.toml \
     --work /tmp/algorithms --out "$out/algorithms.json" > "$out/algorithms.log" 2>&1
   note "algorithms: $?")
}
pair_data() { # other text than the heads learn from, half of it to be asked
  (cd "$work" && export PYTHONPATH=$benchmarks/..:/tmp/site HF_HUB_OFFLINE=1
   python3 "$benchmarks/routing_h200/copy_code.py" /tmp/other-code 12 pandas sklearn matplotlib
   python3 -m mtp.cli nano traces --out other.jsonl --conversations "${PAIR_CONVERSATIONS:-4000}" --seed 1
   python3 -m mtp.cli data prepare --base base --source other.jsonl --source /tmp/other-code \
     --licence "see the packages" --max-length 1024 --max-skip 0.05 --held-out-percent 50 \
     --out other-data) > "$out/pairs-data.log" 2>&1
  note "other data: $?"
}
pairs() { # the NVFP4 head beside the BF16 one, on both bases, on many prompts of other text
  wait_for "$work/grafted/routed-kl-experts-nvfp4@base-nvfp4" 1200
  wait_for "$work/other-data/data.json" 600
  (with_vllm
   python3 "$benchmarks/quality_h200/serve_all.py" "$work" routed-kl routed-kl-experts-nvfp4 \
     --served pairs --data other-data --prompts "${PAIR_PROMPTS:-4500}" --greedy --jobs 4 \
     --seconds 900 > "$out/pairs.log" 2>&1
   note "pairs: $?"
   python3 "$benchmarks/quality_h200/summarize.py" "$work/pairs" "$out/pairs.json" \
     > "$out/pairs.md" 2>&1)
}
own_answers() { # then heads that learn from them
  (with_vllm
   python3 "$benchmarks/quality_h200/own_answers.py" "$work" --rows "${OWN_ROWS:-9000}" \
     > "$out/own-answers.log" 2>&1
   note "own answers: $?")
  HEADS="speculators-post-own routed-kl-own stock-kl-own" JOBS=3 LOG=own quality heads
}

one() {
  export CUDA_VISIBLE_DEVICES=${GPU_ONE:-1}
  LIMIT=170 SITE=/tmp/shapes-site bash "$benchmarks/train_shapes/session.sh" "$out/shapes" \
    > "$out/shapes.md" 2>&1
  note "shapes: done"
  for ((i = 0; i < 400; i++)); do grep -qs '"cache-base"' "$work/logs/times.jsonl" && break; sleep 1; done
  setsid bash "$here/session.sh" losses &
  local losses=$! both
  both &
  both=$!
  routed calls
  links
  (with_vllm
   # Started while others still work; timed when they are done, or stand still.
   bash "$benchmarks/routing_h200/serve.sh" "$hybrid" /tmp/v /tmp/served plain stock routed \
     > "$out/serve.log" 2>&1)
  wait "$both"
  for ((i = 0; i < ${LOSSES:-200}; i++)); do kill -0 $losses 2> /dev/null || break; sleep 1; done
  pkill -STOP -s $losses && note "losses: paused"
  (with_vllm
   WARM_UP=60 python3 "$benchmarks/routing_h200/timing.py" /tmp/served/rounds "$out/speed.json" \
     "${SPEED:-180}" > "$out/speed.log" 2>&1
   python3 "$benchmarks/routing_h200/engines.py" stop /tmp/served/rounds)
  note "speed: done"
  WORK=$hybrid dspark engines draft-engine predict table
  pkill -CONT -s $losses
  WORK=$hybrid dspark deploy
  note "one: done"
}
losses() {
  export CUDA_VISIBLE_DEVICES=${GPU_ONE:-1}
  HEADS="routed-e2e_tv routed-lk routed-tv routed-ce routed-schedule both" JOBS=6 \
    LOG=losses quality heads
}
both() { # needs two GPUs
  export CUDA_VISIBLE_DEVICES=0,1
  cd "$benchmarks/.."
  (export PYTHONPATH=/tmp/site
   bash "$benchmarks/train_processes/session.sh" "$work" "$out/processes" > "$out/processes.txt" 2>&1
   MTP_TRAIN_DEVICE=cuda python3 -m pytest -p no:cacheprovider -q -k two_processes \
     tests/unit/test_train_processes.py > "$out/nccl.log" 2>&1
   note "two processes: $?") &
  (with_vllm
   MTP_GPU_REPORT=$out/cases-two.jsonl MTP_GPU_TIME_LIMIT=450 python3 -m pytest -p no:cacheprovider \
     tests/gpu/test_model_runner_v2.py -k tensor > "$out/cases-two.log" 2>&1
   note "tensor parallel: $?") &
  wait
}
single() {
  [ -z "${STEPS:-}" ] || export SET="train.steps=$STEPS"
  routed base
  # In sessions of their own, so that they can be told to stand still.
  HEADS="routed-kl speculators-post" JOBS=5 LOG=first setsid bash "$here/session.sh" heads &
  local first=$!
  links
  note "single: engines"
  HEADS="stock-kl routed-kl-experts-nvfp4 routed-kl-nvfp4 routed-e2e_tv routed-lk routed-tv routed-ce" \
    JOBS=7 LOG=second setsid bash "$here/session.sh" heads &
  local second=$!
  (with_vllm
   bash "$benchmarks/routing_h200/serve.sh" "$hybrid" /tmp/v /tmp/served plain stock routed \
     > "$out/serve.log" 2>&1)
  pkill -STOP -s "$first"
  pkill -STOP -s "$second"
  note "single: timing"
  (with_vllm
   WARM_UP=${WARM_UP:-25} python3 "$benchmarks/routing_h200/timing.py" /tmp/served/rounds \
     "$out/speed.json" "${SPEED:-100}" > "$out/speed.log" 2>&1
   python3 "$benchmarks/routing_h200/engines.py" stop /tmp/served/rounds)
  pkill -CONT -s "$first"
  pkill -CONT -s "$second"
  note "single: timed"
  HEADS="routed-kl stock-kl routed-kl-experts-nvfp4 speculators-post routed-kl-nvfp4 routed-e2e_tv
    routed-lk routed-tv routed-ce" PROMPTS=800 ENGINES=8 SECONDS_TO_SERVE=600 quality serve &
  ALGORITHM_PROMPTS=24 algorithms &
  wait
  note "single: done"
}
rest() {
  [ -z "${STEPS:-}" ] || export SET="train.steps=$STEPS"
  local heads="speculators-post routed-kl stock-kl routed-kl-muon routed-kl-muon-t06 stock-kl-muon-t06
    routed-ce routed-schedule both routed-kl-t06 speculators-post-3e-3 routed-kl-muon-1e-3 routed-lk
    stock-kl-muon routed-kl-muon-t03" own="speculators-post-own routed-kl-own stock-kl-own"
  compiled_step &
  nano_draft &
  routed base
  [ -z "${PAIR_PROMPTS:-}" ] || pair_data &
  if [ -n "${OWN_ROWS:-}" ]; then own_answers & else own=; fi
  HEADS="$heads" JOBS=${JOBS:-6} LOG=first quality heads &
  HEADS="$heads $own" SECONDS_TO_SERVE=1500 ENGINES=5 PROMPTS=${PROMPTS:-800} quality serve &
  [ -z "${PAIR_PROMPTS:-}" ] || pairs &
  (links; WORK=$hybrid dspark engines predict) &
  (dspark train
   links
   if [ -e "$work/draft-eval.json" ]; then
     WORK=$hybrid dspark deploy &
     WORK=$hybrid dspark draft-engine
     wait
   fi
   wait_for "$hybrid/eval-stock.json" 600
   routed pause; WORK=$hybrid dspark table; routed resume
   ALGORITHM_PROMPTS=24 algorithms) &
  wait
  note "rest: done"
}
draft() {
  head=routed-kl-muon
  (export PYTHONPATH=$benchmarks/..:/tmp/site
   python3 -m pytest -p no:cacheprovider -q -rs tests/gpu/test_losses_cuda.py tests/unit/test_loss_kernels.py \
     > "$out/losses-cuda.log" 2>&1
   note "losses on the device: $?") &
  muon_step &
  routed base
  (HEADS="$head" JOBS=2 LOG=first quality heads
   links; WORK=$hybrid dspark engines predict) &
  dspark train
  links
  if [ -e "$work/draft-eval.json" ]; then
    WORK=$hybrid dspark deploy &
    WORK=$hybrid dspark draft-engine
  fi
  wait
  WORK=$hybrid dspark table
  ALGORITHM_PROMPTS=24 algorithms &
  local more="stock-kl-muon-t03 routed-kl-muon-t03 speculators-post-3e-3 speculators-post"
  HEADS="$more" JOBS=4 LOG=second quality heads &
  HEADS="$head $more" SECONDS_TO_SERVE=900 ENGINES=5 PROMPTS=${PROMPTS:-800} quality serve &
  wait
  note "draft: done"
}
steps() { # NAME CASE...: training steps at the 35B's shapes, while the base learns but for what is timed
  local name=$1 case; shift
  for case in "$@"; do
    PYTHONPATH=$benchmarks/..:/tmp/peers:/tmp/site TRAINING=mtp.cli timeout "${STEP_SECONDS:-220}" python3 \
      "$benchmarks/train_shapes/"$case --out "$out/$name.jsonl" \
      --quiet-by "bash $benchmarks/routing_h200/session.sh" >> "$out/$name.log" 2>&1
    note "step, $case: $?"
  done
  routed resume  # a step that ran out of time may have left the base standing
  touch "$out/$name-done"
}
compiled_step() { # speculators' under torch.compile
  steps compiled "speculators_step.py --name speculators --eager" \
    "speculators_step.py --name speculators-compiled --warm-up 3 --steps 3"
}
muon_step() { # and one row of 32,768 tokens
  steps muon "step.py --name main --accumulation 4" "step.py --name muon --accumulation 4 --optimizer muon" \
    "step.py --name long-row --tokens 32768 --length 32768 --checkpointing"
}
nano_draft() { # the deploy command with a draft for the demo's base, while this session's is not there yet
  [ -d /tmp/nano ] || return
  (cd /tmp/nano
   export PYTHONPATH=$benchmarks/..:/tmp/site HF_HUB_OFFLINE=1
   python3 -m mtp.cli train --draft dspark --base base --data data --out draft \
     --recipe "$benchmarks/../recipes/dspark-nano/recipe.toml" &&
   python3 -m mtp.cli eval --base base --draft draft --data data --report draft-eval.json \
     --recipe "$benchmarks/dspark_h200/recipe.toml") > "$out/nano-draft.log" 2>&1
  note "nano draft: $?"
  wait_for "$out/compiled-done" 400
  WORK=/tmp/nano DEPLOY=nano-deploy dspark deploy
}
heads() { quality heads; }
case $1 in
  zero) taskset -cp "$cores_zero" $$ ;;
  one | losses) taskset -cp "$cores_one" $$ ;;
esac > /dev/null
"$1"
