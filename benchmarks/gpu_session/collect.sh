#!/usr/bin/env bash
# What there is so far, into OUT (at most 16 MiB a file). Usage: collect.sh OUT
set -uo pipefail
out=$1
here=$(cd "$(dirname "$0")" && pwd)
bash "$here/../quality_h200/session.sh" measure
for name in plain stock routed; do cp /tmp/served/rounds/$name/log.txt /tmp/out/engine-$name.txt; done 2> /dev/null
for name in plain stock routed dspark dspark-auto dspark-eager; do
  cp /tmp/hybrid/table/$name/log.txt /tmp/out/table-$name.txt
done 2> /dev/null
tar czf "$out/out.tar.gz" -C /tmp --exclude='*.tar.gz' out
tar czf "$out/work.tar.gz" -C /tmp/work --exclude='pairs/plan.json' --exclude='*.safetensors' \
  $(cd /tmp/work && ls -d served pairs logs heads/*/*.json* draft/*.json* draft.run/history.jsonl 2> /dev/null)
cat /tmp/out/progress.txt
