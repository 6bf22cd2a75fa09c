#!/usr/bin/env bash
# Fill .carry with what a session's calls bring: wheels of training (train) and of speculators (peers),
# vLLM in three parts (p0 to p2). Usage, where there is a network: pack.sh PACK_VLLM.PY
# PACK_VLLM.PY is the machine's own script that packs vLLM 0.33; its parts are made to fit a call.
set -euo pipefail
pack_vllm=$1
cd "$(dirname "$0")/../.."
download=(python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12)
for tag in _2_28 _2_17 2014; do download+=(--platform "manylinux${tag}_x86_64"); done
mkdir -p .carry; rm -rf .carry/train .carry/peers .carry/p?

# pydantic as vLLM's parts have it: training comes before them on the path.
"${download[@]}" -d .carry/train datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 \
  nvidia-modelopt==0.47.0 omegaconf==2.4.0 antlr4-python3-runtime==4.13.2 pulp==3.3.2 \
  pydantic==2.13.4 pydantic-core==2.46.4 annotated-types typing-inspection==0.4.5 typing-extensions
python3 - .carry/train/pulp-*.whl <<'PYTHON'
"""PuLP without its solvers, 16 MB that nobody calls."""
import sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    kept = {n: wheel.read(n) for n in wheel.namelist() if not n.startswith("pulp/solverdir/")}
with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as wheel:
    for name, data in kept.items():
        wheel.writestr(name, data)
PYTHON
.venv/bin/pip wheel -q --no-deps . -w .carry/train # for the plugin's entry point

"${download[@]}" -d .carry/peers speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 \
  openai==2.8.0 jiter distro==1.9.0 sniffio pydantic==2.14.4 pydantic-core==2.50.5 annotated-types \
  pydantic-settings python-dotenv typing-extensions typing-inspection

sed 's/^MAX_PART = .*/MAX_PART = 60_000_000/' "$pack_vllm" > .carry/pack_vllm.py
cp "$(dirname "$pack_vllm")/unpack_vllm.sh" .carry/
python3 .carry/pack_vllm.py .carry/vllm
for part in 0 1 2; do
  mkdir .carry/p$part
  mv .carry/vllm/vllm.part.0$part .carry/p$part/
  cp .carry/vllm/unpack_vllm.sh .carry/p$part/
done
rm -r .carry/vllm .carry/*.py .carry/*.sh
du -sh .carry/*
