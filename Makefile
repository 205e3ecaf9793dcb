# The front door. Settings are in .env.example; `make loadtest USERS=8` overrides one for a single command.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
# ONNX Runtime 1.29 and later report usage by default.
export ORT_DISABLE_TELEMETRY := 1

venv := .venv
python := $(venv)/bin/python
ready := $(venv)/.installed

$(ready): requirements.lock
	@scripts/install.sh $(venv) requirements.lock
	@touch $@

# What only looks at the stack or stops it installs nothing for that.
if_installed := [ -e $(ready) ] || { echo "not running: nothing is installed here yet (make up)"; exit 0; };

##@ The stack

up: models ## Start Triton and Prometheus, wait until the models answer, print the addresses
	@$(python) -m scripts.local up

down: ## Stop them
	@$(if_installed) $(python) -m scripts.local down

status: ## Show how each process and each model is
	@$(if_installed) $(python) -m scripts.local status

logs: ## Show the logs (and follow them, on a terminal)
	@$(if_installed) $(python) -m scripts.local logs

smoke: $(ready) ## Send the running models their example requests and check the answers
	@$(python) -m scripts.smoke

models: $(ready) ## Assemble the model repository: SYSTEMS="embedding"
	@$(python) -m scripts.models

##@ Measuring

loadtest: up ## Compare dynamic batching with none on the running server, and write a report
	@$(python) -m loadtest

locust: up ## Locust's own web page against the running server
	@$(python) -m loadtest.web

bench: models ## The figures of docs/benchmarks.md on this machine (30 minutes, a server of its own)
	@$(python) -m scripts.bench

##@ Working on it

test: lint test-unit test-stack ## Everything below

lint: $(ready) ## ruff, shellcheck
	@$(venv)/bin/ruff check
	@$(venv)/bin/ruff format --check
	@$(venv)/bin/shellcheck images/triton/serve.sh scripts/*.sh .ci/run

test-unit: $(ready) ## Tests without a server
	@$(python) -m pytest tests/unit

test-stack: models ## Tests on the real Triton, Prometheus and Locust, on ports of their own
	@$(python) -m pytest tests/stack

lock: ## Resolve the groups of pyproject.toml anew into requirements.lock
	@scripts/lock.sh

clean: ## Stop everything; remove what make made, but not .env and the reports
	@[ ! -e $(ready) ] || { $(python) -m scripts.local clean && $(python) -m scripts.models --clean; }
	@rm -rf $(venv) .pytest_cache .ruff_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +

help: ## This list
	@awk -f scripts/help.awk $(MAKEFILE_LIST)

.PHONY: up down status logs smoke models loadtest locust bench test lint test-unit test-stack lock clean help
