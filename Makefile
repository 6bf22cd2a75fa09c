# Two commands matter: `make demo` and `make test`. Both make the virtual environment they need.

PYTHON ?= python3
# Any build of torch from 2.11 on will do. On PyPI this is a CUDA build, which also runs on a CPU;
# TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0" takes the small one.
TORCH ?= torch==2.13.0
# The vLLM wheel for CPUs was built for this torch.
VLLM_TORCH ?= torch==2.13.0
VENV := .venv
VLLM_VENV := .venv-vllm
DEMO := build/nano
# Steps of the DSpark draft; its recipe's 400 take over 7 minutes on a CPU.
DRAFT_STEPS ?=
BIN := $(VENV)/bin

.PHONY: help demo test test-vllm check release venv vllm-env clean

help:
	@grep -E '^# [a-z-]+:' Makefile | sed 's/^# //'

# demo: train, quantize, graft, serve and measure a small real model (10 to 12 minutes)
demo: venv vllm-env
	MTP=$(BIN)/mtp VLLM_PYTHON=$(VLLM_VENV)/bin/python bash recipes/nano/run.sh $(DEMO)

# release: Hub-ready folders of the demo's model and of a DSpark draft for its base
release: $(DEMO)/served.json $(DEMO)/draft-eval.json
	$(BIN)/mtp release build --checkpoint $(DEMO)/grafted-nvfp4 --out $(DEMO)/release \
	  --name mtp-graft-nano --license mit --license-file LICENSE --overwrite \
	  --evaluation $(DEMO)/quantize.json --served $(DEMO)/served.json
	$(BIN)/mtp release draft --draft $(DEMO)/draft --base $(DEMO)/base --out $(DEMO)/release-draft \
	  --name mtp-graft-nano-dspark --base-name mtp-graft-nano --license mit --license-file LICENSE \
	  --evaluation $(DEMO)/draft-eval.json --overwrite

$(DEMO)/draft-eval.json: $(DEMO)/served.json
	MTP=$(BIN)/mtp STEPS=$(DRAFT_STEPS) bash recipes/dspark-nano/run.sh $(DEMO)

$(DEMO)/served.json:
	$(MAKE) demo

# test: unit tests, no vLLM
test: venv
	$(BIN)/pytest tests --ignore tests/vllm

# test-vllm: tests inside a real vLLM, on the demo's model
test-vllm: $(DEMO)/served.json vllm-env
	MTP_DEMO=$(DEMO) MTP_REQUIRE_VLLM=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm

# check: ruff and mypy
check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(VENV)/installed
$(VENV)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

# vllm-env: a second virtual environment with vLLM for CPUs
vllm-env: $(VLLM_VENV)/installed
$(VLLM_VENV)/installed: pyproject.toml Makefile mtp/serving/cpu_env.py
	$(PYTHON) -m mtp.serving.cpu_env $(VLLM_VENV) "$(VLLM_TORCH)"
	$(VLLM_VENV)/bin/pip install -q --no-deps -e .
	touch $@

clean:
	rm -rf build
