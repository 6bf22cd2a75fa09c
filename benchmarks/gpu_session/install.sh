#!/usr/bin/env bash
# The first call of a session: wheels, the repository, code for the data, and what may be carried
# besides: the base of an earlier session, a demo with its draft.
# Usage, in the repository's copy on the GPU machine: install.sh
set -euo pipefail
mkdir -p /tmp/out /tmp/work /tmp/parts
cp -r . /tmp/repo
pip=(python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir)
"${pip[@]}" --target /tmp/site .carry/train/*.whl
"${pip[@]}" --target /tmp/peers .carry/peers/*.whl &
[ ! -d .carry/base ] || python3 benchmarks/gpu_session/carry_base.py unpack .carry/base /tmp/work/base
[ ! -d .carry/nano ] || cp -r .carry/nano /tmp/nano
PYTHONPATH=/tmp/site python3 benchmarks/routing_h200/copy_code.py /tmp/code 12 torch sympy scipy \
  transformers
wait
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
nvidia-smi topo -m || true
