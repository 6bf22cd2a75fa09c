#!/usr/bin/env bash
# On the GPU machine: the hybrid base and its data as for routing, then a draft for them. What WORK
# already holds is kept. Usage: train.sh WORK CODE (as for routing_h200)
set -euo pipefail
work=$1 code=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
UNTIL=data bash "$here/../routing_h200/train.sh" "$work" "$code"
export PYTHONPATH="$root:${PYTHONPATH:-}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
cd "$work"
make() { # FILE mtp-arguments...: run unless FILE is there
  local file=$1 t=$SECONDS; shift
  [ -e "$file" ] && return
  printf '\n$ mtp %s\n' "$*"
  python3 -m mtp.cli "$@" || return
  echo "[$((SECONDS - t)) s]"
}
# A step from the base in process takes longer than the draft's own: transformers' fallback of gated
# delta net is slow, and the states are the same each time.
recipe=${DRAFT_RECIPE:-$here/recipe.toml}
make cache-draft data cache --base base --data data --recipe "$recipe" --max-gigabytes 20 --out cache-draft
training=(train --base base --data data --recipe "$recipe" --set teacher.kind=cache
  --set teacher.cache=cache-draft --out draft)
if ! make draft "${training[@]}"; then # is it attention's kernel once more?
  python3 -c 'from torch.nn.attention import SDPBackend; import mtp.dspark.model; from mtp.cli import main
mtp.dspark.model.KERNELS = [SDPBackend.MATH]
print("again, attention by torch.matmul alone", flush=True); main()' "${training[@]}" --overwrite
fi
make draft-eval.json eval --base base --draft draft --data data --recipe "$recipe" \
  --report draft-eval.json
touch finished-draft
