# One command per chore. Every target works on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install browser test speed demo docs lint types layers format clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Everything: the package, PyTorch with the model zoos, and what the tests need.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

install: $(VENV)/.installed

# Tests of the HTML report and the local page skip without a browser; CI, which runs as root, installs one.
browser:
	@command -v chromium > /dev/null || test "$$CI" != true || \
		{ apt-get update -qq && apt-get install -y -qq chromium; } > /dev/null || echo 'no chromium: browser tests will skip'

demo: $(VENV)/.installed
	$(BIN)/foretell predict timm:resnet50 --on a100-sxm4-80gb --batch 64

# The documentation as a site, in site/: open site/index.html.
docs: $(VENV)/.installed
	$(BIN)/python docs/reference/cli.py
	$(BIN)/mkdocs build --strict

lint: $(VENV)/.installed
	$(BIN)/ruff check src tests benchmarks docs

types: $(VENV)/.installed
	$(BIN)/mypy

layers: $(VENV)/.installed
	$(BIN)/lint-imports

test: browser lint types layers
	$(BIN)/python -m pytest

# The limits on time that tests state, on an idle machine.
speed: $(VENV)/.installed
	$(BIN)/python -m pytest --speed tests

format: $(VENV)/.installed
	$(BIN)/ruff check --fix src tests benchmarks

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
