#!/usr/bin/env bash
# On the GPU machine: the hybrid base and its head by the project's own commands, nothing carried.
# Usage: train.sh WORK CODE (CODE: a folder of Python source for the base)
# What WORK already holds is kept, so a broken run goes on where it stopped. UNTIL=data ends early.
set -euo pipefail
work=$1 code=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
recipe=${RECIPE:-$root/recipes/hybrid/recipe.toml}
export PYTHONPATH="$root:${PYTHONPATH:-}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
mkdir -p "$work"
cd "$work"
make() { # FILE mtp-arguments...: run unless FILE is there
  local file=$1 t=$SECONDS; shift
  [ -e "$file" ] && return
  printf '\n$ mtp %s\n' "$*"
  python3 -m mtp.cli "$@"
  echo "[$((SECONDS - t)) s]"
}
make traces.jsonl nano traces --out traces.jsonl --conversations "${CONVERSATIONS:-2000}"
make base nano base --traces traces.jsonl --code "$code" --recipe "$recipe" --out base
make data data prepare --base base --source traces.jsonl --source "$code" \
  --licence "see the packages" --max-length 1024 --max-skip 0.05 --out data
[ "${UNTIL:-}" != data ] || exit 0
make head train --base base --data data --recipe "$recipe" --out head
make grafted graft --base base --head head --out grafted
make head-nvfp4 quantize --head head --base base --data data --recipe "$recipe" \
  --out head-nvfp4 --report quantize.json
make grafted-nvfp4 graft --base base --head head-nvfp4 --out grafted-nvfp4
make verified verify grafted-nvfp4 --base base
touch finished
