# The front door. Settings are in .env.example; `make loadtest USERS=8` overrides one for a single command.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
# ONNX Runtime 1.29 and later report usage by default.
export ORT_DISABLE_TELEMETRY := 1

# docker or local, unless RUNTIME says which.
export RUNTIME := $(shell scripts/make/runtime.sh)

venv := .venv
python := $(venv)/bin/python
# Everything, and the little that these targets need themselves when the rest is in containers.
all := $(venv)/.installed
tools := $(venv)/.installed-tools
installed := $(if $(filter docker,$(RUNTIME)),$(tools),$(all))
# What talks to Oracle Cloud besides.
oci := $(if $(filter docker,$(RUNTIME)),$(venv)/.installed-oci,$(all))

$(all): requirements.lock
	@scripts/make/install.sh $(venv) requirements.lock
	@touch $@ $(tools)

$(tools): requirements.lock
	@scripts/make/install.sh $(venv) requirements.lock tools
	@touch $@

$(venv)/.installed-oci: $(tools)
	@scripts/make/install.sh $(venv) requirements.lock oci
	@touch $@

# What only looks at the stack or stops it installs nothing for that.
if_installed := [ -e $(installed) ] || { echo "not running: nothing is installed here yet (make up)"; exit 0; };

##@ The stack

up: models ## Start the stack, wait until the models answer, print the addresses: RUNTIME, PROFILE, SYSTEMS
	@$(python) -m scripts.stack up

down: ## Stop it
	@$(if_installed) $(python) -m scripts.stack down

status: ## Show how each process and each model is
	@$(if_installed) $(python) -m scripts.stack status

logs: ## Show the logs (and follow them, on a terminal)
	@$(if_installed) $(python) -m scripts.stack logs

smoke: $(installed) ## Send the running models their example requests and check the answers
	@$(python) -m scripts.stack.smoke

models: $(installed) ## Assemble the model repository: SYSTEMS="embedding", or HF_MODEL, SOURCE; LIST=1 lists what there is
	@$(python) -m scripts.stack models

generate: $(installed) ## Have the running model continue PROMPT="...": SYSTEM=gpt2_ensemble, TOKENS=20
	@$(python) -m scripts.stack.generate

package: models ## The models of SYSTEMS as one zip, for a cloud's model catalogue
	@$(python) -m scripts.models.package

build: $(installed) ## Build the images of PROFILE (`make up` does it too, and says less); TAG=name: one with just what SYSTEMS need
	@$(python) -m scripts.stack build

build-cpu: ## Build those of PROFILE=cpu
build-cuda: ## Build those of PROFILE=cuda
build-neuron: ## Build those of PROFILE=neuron
build-cpu build-cuda build-neuron: build-%: $(installed)
	@PROFILE=$* $(python) -m scripts.stack build

##@ Oracle Cloud

deploy-oci: $(oci) ## Deploy what deploy/oci/deployment.toml says, or update it: DRY_RUN=1 shows the requests, PUSH=1 pushes the image
	@$(python) -m deploy.oci.deploy

predict-oci: $(oci) ## Ask the deployment: PROMPT="...", SYSTEM, TOKENS; or REQUEST=file.json
	@$(python) -m deploy.oci.predict

destroy-oci: $(oci) ## Delete the deployment and the models that were made for it: DRY_RUN=1 names them
	@$(python) -m deploy.oci.destroy

##@ Measuring

# What they measure is served too: `make loadtest SYSTEM=vit_ensemble` is enough.
loadtest locust: export SERVE_SYSTEM := 1

loadtest: up ## Compare dynamic batching with none on the running server, and write a report
	@$(python) -m scripts.stack loadtest

locust: up ## Locust's own web page against the running server
	@$(python) -m scripts.stack locust

dashboards: $(installed) ## The dashboards as one page, without Grafana: RANGE, UNTIL
	@$(python) -m scripts.stack dashboards

bench: $(all) ## The figures of the docs on this machine: BENCH=embedding (30 minutes), generation, gpt2, text-formats, vision-formats
	@$(python) -m scripts.bench $(or $(BENCH),embedding)

##@ Working on it

# Modules run side by side, each with servers of its own: at most four, for the memory's sake.
pytest := $(python) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test: lint test-unit test-stack ## Lint, unit tests, and the stack tests that are quick (10 minutes on 2 cores)

test-all: lint test-unit test-stack-all ## All tests that need no Docker engine, as CI runs them

lint: $(all) ## ruff, mypy, import directions, spelling, shellcheck, hadolint; the dashboards are as committed
	@$(venv)/bin/ruff check
	@$(venv)/bin/ruff format --check
	@$(venv)/bin/lint-imports --quiet
	@$(venv)/bin/mypy
	@git ls-files -z | xargs -0 $(venv)/bin/codespell
	@$(venv)/bin/shellcheck images/triton/serve.sh scripts/make/*.sh scripts/neuron/*.sh images/*.sh tests/*.sh tests/docker/*.sh .ci/run
	@$(python) -m scripts.dashboards --check
	@$(venv)/bin/hadolint images/*/Dockerfile* tests/docker/stand-ins/*/Dockerfile

test-unit: $(all) ## Tests without a server
	@$(pytest) tests/unit

test-stack: $(all) ## Quick tests on the real Triton, Prometheus and Locust, on ports of their own
	@$(python) -m scripts.models
	@$(pytest) -m "not slow" tests/stack

test-stack-all: $(all) ## Those and the slow ones; TENSORFLOW=.local/tensorflow for SavedModels too
	@$(if $(TENSORFLOW),tests/tensorflow.sh)
	@$(python) -m scripts.models
	@$(pytest) tests/stack

test-docker: $(all) ## Tests on a real Docker engine: the images, the composed stack (30 minutes the first time)
	@tests/docker/run.sh

dashboards-json: $(all) ## Write the dashboards of scripts/dashboards for Grafana
	@$(python) -m scripts.dashboards

lock: ## Resolve the groups of pyproject.toml anew into requirements.lock
	@scripts/make/lock.sh

clean: ## Stop everything; remove what make made, but not .env and the reports
	@[ ! -e $(installed) ] || $(python) -m scripts.stack clean
	@rm -rf $(venv) .pytest_cache .ruff_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +

help: ## This list
	@awk -f scripts/make/help.awk $(MAKEFILE_LIST)

.PHONY: up down status logs smoke models generate package build build-cpu build-cuda build-neuron loadtest locust dashboards bench test lint test-unit test-stack test-docker dashboards-json lock deploy-oci predict-oci destroy-oci clean help
