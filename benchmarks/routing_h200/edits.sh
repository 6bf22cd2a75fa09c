#!/usr/bin/env bash
# The edited copies that two variants run. Usage: edits.sh VLLM (where vLLM was unpacked)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/edits"
[ -e "$1/edits/vllm" ] || python3 "$here/edit_vllm.py" "$1/vllm-slim" "$1/edits/vllm"
for kind in compiled counted; do
  [ -e "$1/edits/$kind" ] || python3 "$here/edit_plugin.py" "$here/../.." "$1/edits/$kind" $kind
done
