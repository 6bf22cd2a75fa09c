#!/usr/bin/env bash
# The same recipe in one process and in two, replicated and sharded, as docs/training.md launches it.
# Usage: session.sh WORK OUT. WORK holds base, data and cache-base (quality_h200/train_all.py).
# DEVICE=cpu rehearses with gloo; GPUS names the two GPUs (0,1).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$1 out=$2 device=${DEVICE:-cuda} gpus=${GPUS:-0,1} runs=${RUNS:-/tmp/train-processes}
mkdir -p "$out" "$runs"
export PYTHONPATH=$root:${PYTHONPATH:-} HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1
recipe=(train "$root/recipes/hybrid/recipe.toml" --base "$work/base" --data "$work/data"
  --device "$device" --overwrite --set teacher.kind=cache --set "teacher.cache=$work/cache-base"
  --set "train.steps=${STEPS:-40}" --set train.warmup_steps=5 --set train.eval_every=0
  --set train.checkpoint_every=0 --set "train.tokens_per_batch=${TOKENS:-32768}"
  --set "train.micro_batch_tokens=${MICRO:-8192}" --set eval.num_prompts=8
  --set eval.max_prompt_tokens=256 --set eval.num_tokens=16)
one() { # NAME GPU [OPTION...]
  local name=$1 gpu=$2; shift 2
  CUDA_VISIBLE_DEVICES=$gpu python3 -m mtp.cli "${recipe[@]}" --out "$runs/$name" "$@" \
    > "$out/$name.log" 2>&1
  echo "$name: $?"
}
two() { # NAME [OPTION...]
  local name=$1 launch; shift
  launch=(accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1
    --mixed_precision no --dynamo_backend no)
  [ "$device" != cpu ] || launch=(torch.distributed.run --nproc_per_node 2) # it has no gloo mode
  CUDA_VISIBLE_DEVICES=$gpus python3 -m "${launch[@]}" -m mtp.cli "${recipe[@]}" \
    --out "$runs/$name" "$@" > "$out/$name.log" 2>&1
  echo "$name: $?"
}
one one "${gpus%,*}" &
one one-again "${gpus#*,}" &
wait
one whole-batch "${gpus%,*}" --set train.micro_batch_tokens=0 &
wait
two replicated
two sharded --shard
python3 "$here/compare.py" "$runs" "$out/processes.json"
