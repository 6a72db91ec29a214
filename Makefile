# Everything a person does with this repository. `make` alone lists it. Needs Python 3.11 to 3.13 and nothing else.

VENV   ?= .venv
EXTRAS ?= cpu,dev
PORT   ?= 5000
ARGS   ?=
BIN    := $(VENV)/bin
LINTED := $(wildcard citer_ray jobs benchmarks)

export VENV EXTRAS PYTHON
# Nothing here reports usage to anybody, unless you say so.
export RAY_USAGE_STATS_ENABLED ?= 0
export VLLM_NO_USAGE_STATS ?= 1
export MLFLOW_DISABLE_TELEMETRY ?= true
export HF_HUB_DISABLE_TELEMETRY ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart pair test lint audit format mlflow bench chaos clean distclean

help: ## list the targets
	@echo "make TARGET [ARGS='...'] [PYTHON=python3.12] [VENV=.venv] [EXTRAS=cpu,dev | gpu,dev | dev]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## make .venv with all that is needed (done once; every target below does it by itself)
	@bash infra/setup.sh

quickstart: setup ## the whole loop on the embedded pair: collect, fit, iterate, evaluate; prints the table
	$(BIN)/citer quickstart $(ARGS)

pair: setup ## train the embedded pair again from its recipe (its weights are shipped; about 15 minutes)
	$(BIN)/citer pair build $(ARGS)

test: setup ## run all tests (a part: make test ARGS='tests/unit -k router')
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff, formatting and types; changes nothing
	@status=0; \
	for check in "ruff check ." "ruff format --check ." "mypy $(LINTED)"; do \
		echo "$$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

audit: setup ## known vulnerabilities of what is installed: a report that never fails (asks PyPI)
	$(BIN)/python infra/audit.py

format: setup ## format the code and apply ruff's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mlflow: setup ## compare runs in the browser: MLflow on http://127.0.0.1:5000 (another port: PORT=...)
	@test -f runs/mlflow.db || { echo "runs/mlflow.db is not there yet: make quickstart writes it" >&2; exit 1; }
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server --backend-store-uri sqlite:///runs/mlflow.db \
		--default-artifact-root ./runs/mlartifacts --workers 1 --host 127.0.0.1 --port $(PORT)

bench: setup ## run the benchmarks (one suite: ARGS=collect; a quick look: ARGS=--short)
	$(BIN)/python -m benchmarks $(ARGS)

chaos: setup ## kill runs at random moments and compare what comes out (other trials: ARGS='--trials 50 --seed 1')
	$(BIN)/python -m benchmarks.chaos $(ARGS)

clean: ## remove caches and build output; runs/ and the environment stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find citer_ray jobs tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove the environment as well
	rm -rf $(VENV)
