# `make demo` and `make test` set up what they need and then run; a second call skips the set-up.
#
#   PYTHON=python3.12     the interpreter the environment is made from (3.11 or later)
#   SYSTEM=1              use PYTHON's own environment as it is (it must hold torch): nothing is downloaded
#   PIP_ARGS="..."        passed on to every pip install

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?= --data ml-100k --config tiny --seeds 3 --history 16
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifdef SYSTEM
  STAMPS := build/system
  PY := $(PYTHON)
else
  STAMPS := $(VENV)
  PY := $(VENV)/bin/python
endif

# Without a CUDA GPU: the pinned set, and torch's CPU build (a plain `torch` on Linux brings gigabytes of CUDA).
HAS_CUDA := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
ifeq ($(HAS_CUDA),0)
  CONSTRAINTS := -c constraints/cpu.txt
  TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints/cpu.txt)
  ifeq ($(shell uname -s),Linux)
    TORCH_CPU := torch==$(TORCH_VERSION)+cpu
  endif
endif
PIP_INSTALL = $(PY) -m pip install -q $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test lint types pytest bench releases clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(STAMPS)/.demo  ## set up, then train GEM in BF16 and MXFP8 on MovieLens-100K and print the verdict
	$(PY) -m gem_model.cli compare $(DEMO_ARGS)

test: $(STAMPS)/.test lint types pytest  ## set up, then lint, strict types and every test

lint: $(STAMPS)/.test  ## ruff: rules and format
	$(call TOOL,ruff) check .
	$(call TOOL,ruff) format --check .

types: $(STAMPS)/.test  ## mypy --strict on the library, the model and the benchmarks
	$(call TOOL,mypy) mxfp8 gem_model bench

# One thread a worker: two workers with a thread pool each would fight for the cores.
pytest: $(STAMPS)/.test  ## every test; PYTEST_ARGS="-k name" narrows
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(or $(WORKERS),2) $(PYTEST_ARGS)

bench: $(STAMPS)/.test  ## the CPU benchmarks, printed and not saved
	$(PY) -m bench.quantize --device cpu
	$(PY) -m bench.linear --device cpu

# The releases that kernels/_gluon.py names, beside the one in constraints/; a folder that does not install is an error.
RELEASES ?= 3.7.1 3.8.0 3.9.0
releases: $(STAMPS)/.test  ## compile every kernel with other Triton releases, each in a folder of build/
	@set -e; for v in $(RELEASES); do \
	  test -d build/triton-$$v || $(PIP_INSTALL) --no-deps --target build/triton-$$v triton==$$v; \
	  echo "triton $$v"; \
	  PYTHONPATH=build/triton-$$v OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(or $(WORKERS),2) -p no:cacheprovider \
	    numerics_tests/test_aot*.py numerics_tests/test_gemm_parts.py numerics_tests/test_triton_releases.py; \
	done

clean:  ## remove the environment and what tools left
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A tool that the system's environment lacks is reported and not run; in our own environment it is always there.
ifdef SYSTEM
  TOOL = @$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("$(1)") is None)' || { echo "== $(1) is not installed here: not run"; exit 0; }; $(PY) -m $(1)
else
  TOOL = $(PY) -m $(1)
endif

$(VENV)/.python:
	@echo "== creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Two tries for torch: what the configured indexes offer, then PyTorch's own index of CPU builds.
$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints/cpu.txt
ifdef TORCH_CPU
	@echo "== installing $(TORCH_CPU)"
	@$(PIP_INSTALL) $(CONSTRAINTS) "$(TORCH_CPU)" 2>/dev/null \
	    || $(PIP_INSTALL) $(CONSTRAINTS) --extra-index-url $(TORCH_CPU_INDEX) "$(TORCH_CPU)"
endif
	@echo "== installing mxfp8 and what it needs"
	@$(PIP_INSTALL) $(CONSTRAINTS) -e .
	@echo "== installing the recbole wheel, for the MovieLens-100K files inside it"
	@$(PIP_INSTALL) --no-deps recbole==1.2.1
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "== installing the test tools"
	@$(PIP_INSTALL) $(CONSTRAINTS) -e '.[test,dev,triton]'
	@touch $@

build/system/.demo build/system/.test: pyproject.toml
	@echo "== installing mxfp8 alone into $(PYTHON)'s environment"
	@$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@mkdir -p $(@D) && touch $@
