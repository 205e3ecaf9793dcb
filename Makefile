# The front door. Settings are in .env.example; `make loadtest USERS=8` overrides one for a single command.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
# ONNX Runtime 1.29 and later report usage by default.
export ORT_DISABLE_TELEMETRY := 1
# Some container images set PYTHONDONTWRITEBYTECODE. With it, each process would compile the project anew.
export PYTHONDONTWRITEBYTECODE :=
# Only variables on make's command line are settings; an exported USERS may belong to another program.
on_command_line := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
export TRITON_SETTINGS_NAMES := $(strip $(TRITON_SETTINGS_NAMES) $(on_command_line))

# docker or local, worked out once, at the first use: `docker info` takes up to 10 s.
# The variables are repeated because $(shell) gets none of the command line.
runtime = $(eval runtime := $(shell RUNTIME='$(RUNTIME)' LOCAL_STATE='$(LOCAL_STATE)' \
  TRITON_SETTINGS_NAMES='$(TRITON_SETTINGS_NAMES)' TRITON_SETTINGS_FILE='$(TRITON_SETTINGS_FILE)' \
  scripts/make/runtime.sh))$(runtime)
with_runtime = RUNTIME='$(runtime)' TRITON_SETTINGS_NAMES='$(TRITON_SETTINGS_NAMES) RUNTIME'

venv := .venv
python := $(venv)/bin/python
stack = $(with_runtime) $(python) -m scripts.stack
# Markers of installed packages: one for each dependency group of pyproject.toml, and one for all.
all := $(venv)/.installed-all
# `stack` serves, exports and measures models without Docker. It contains `tools`, the packages of make's own commands.
serving := $(venv)/.installed-stack
tools := $(venv)/.installed-tools
# With Docker, the other packages are in container images.
installed = $(if $(filter docker,$(runtime)),$(tools),$(serving))

# As a prerequisite, $(installed) would work out the runtime for every target, because make expands it as it reads this.
packages: ; @$(MAKE) --silent $(installed)
# The commands for Oracle Cloud need its SDK too.
packages-oci: ; @$(MAKE) --silent $(installed) $(venv)/.installed-oci
.PHONY: packages packages-oci

$(venv)/.installed-%: uv.lock pyproject.toml
	@scripts/make/install.sh $(venv) $*
	@touch $@ $(addprefix $(venv)/.installed-,$(holds_$*))
holds_stack := tools
holds_all := tools stack oci

# `down`, `status`, `logs` and `clean` must not trigger an install. Without any package, no runtime is worked out either.
is_installed = $(and $(wildcard $(tools)),$(wildcard $(installed)))
if_installed = $(if $(is_installed),$(stack) $(1),echo "not running: 'make up' starts the stack")

##@ The stack

up: packages ## Start the stack, serve SYSTEMS and unload others, print the addresses: RUNTIME, PROFILE, SYSTEMS
	@$(stack) up

add: packages ## Serve SYSTEM too, and add it to SYSTEMS in .env: with HF_MODEL or SOURCE if it is new; ADAPTERS, DRAFT of a language model
	@$(stack) add

remove: packages ## Unload SYSTEM, delete its files, take it out of SYSTEMS in .env; SYSTEM=name:adapter removes an adapter
	@$(stack) remove

down: ## Stop the stack
	@$(call if_installed,down)

status: ## Show the state of each process and each model
	@$(call if_installed,status)

logs: ## Show the logs (and follow them, on a terminal)
	@$(call if_installed,logs)

smoke: packages ## Send the running models their example requests and check the answers
	@$(python) -m scripts.stack.smoke

models: packages ## Assemble the model repository: SYSTEMS="embedding", or HF_MODEL, SOURCE; LIST=1 lists the systems
	@$(stack) models

generate: packages ## Have the running model continue PROMPT="...": SYSTEM=gpt2_ensemble, TOKENS=32
	@$(python) -m scripts.stack.generate

package: models ## Pack the models of SYSTEMS into one zip, for a cloud's model catalogue
	@$(python) -m export.package

build: packages ## Build the images of PROFILE; TAG=name: an image with only what SYSTEMS need
	@$(stack) build

build-cpu: ## Build the images of PROFILE=cpu
build-cuda: ## Build the images of PROFILE=cuda
build-neuron: ## Build the images of PROFILE=neuron
build-cpu build-cuda build-neuron: build-%:
	@$(MAKE) build PROFILE=$*

##@ Oracle Cloud

deploy-oci: packages-oci ## Deploy or update the models of deploy/oci/deployment.toml: DRY_RUN=1 prints the requests, PUSH=1 pushes the image
	@$(with_runtime) $(python) -m deploy.oci.deploy

predict-oci: packages-oci ## Send the deployment a request: PROMPT="...", SYSTEM, TOKENS; or REQUEST=file.json
	@$(python) -m deploy.oci.predict

destroy-oci: packages-oci ## Delete the deployment and its models: DRY_RUN=1 prints their names
	@$(python) -m deploy.oci.destroy

##@ Measuring

loadtest: packages ## Serve SYSTEM, compare dynamic batching with the modes without it, and write a report: USERS, ROUNDS, MODES, PROTOCOL; or its FORMATS
	@$(stack) loadtest

tune: packages ## Find the fastest configuration for a latency target on the running server: P95=100 or RATE=200, MINUTES, APPLY
	@$(stack) tune

drill: $(serving) ## Break a stack of its own under load, and print what that cost: DRILL="name name", LIST=1; or soak it: SOAK=30 (minutes), USERS
	@$(if $(filter 1,$(LIST)),,$(MAKE) models RUNTIME=local SYSTEMS=embedding)
	@$(python) -m loadtest.drills $(if $(filter 1,$(LIST)),--list) $(DRILL)

locust: packages ## Serve SYSTEM and Locust's own web page, for tests against the running server
	@$(stack) locust

dashboards: packages ## Draw the dashboards as one page, without Grafana: RANGE, UNTIL
	@$(stack) dashboards

bench: $(all) ## Measure figures of the docs: BENCH=embedding, engines, generation, speech, architectures, peers, gpu, requests, gateway, tracing
	@$(python) -m loadtest.bench $(or $(BENCH),embedding)

##@ Working on it

# Each process imports all test modules, which takes 10 to 20 s of CPU time. Stack tests also wait, so they get one more
# than there are cores. At most four modules run side by side, because each stack takes memory.
# A process that crashed is not replaced: the new one may wait for ever for tests (pytest-xdist 3.8).
pytest = $(python) -m tests.rerun $(1) --numprocesses $(2) --maxprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
unit_tests = $(call pytest,tests $(addprefix --ignore=tests/,stack docker kubernetes),$$(nproc))
stack_tests = $(call pytest,tests/stack,$$(($$(nproc) + 1)))

# SLOW=1 leaves out only the tests marked `slowest`, and SLOW=2 none.
left_out_tests = $(if $(filter 2,$(SLOW)),,-m "not slowest$(if $(SLOW),, and not slow)")

test: lint test-unit test-stack ## Lint, and the tests that are quick (10 minutes on 2 cores); SLOW=1 adds the slow ones, SLOW=2 the slowest, too

lint: $(all) ## ruff, mypy, import directions, spelling, shellcheck, hadolint, and generated files are as committed
	@$(venv)/bin/ruff check
	@$(venv)/bin/ruff format --check
	@$(venv)/bin/lint-imports --no-logo >/dev/null || $(venv)/bin/lint-imports --no-logo
	@$(venv)/bin/mypy
	@git ls-files -z | xargs -0 $(venv)/bin/codespell
	@awk -f scripts/make/docs-width.awk $$(git ls-files "*.md")
	@$(venv)/bin/shellcheck images/triton/serve.sh loadtest/bench/gpu/run.sh deploy/kubernetes/*.sh scripts/make/*.sh scripts/neuron/*.sh images/*.sh tests/*.sh tests/docker/*.sh .ci/run
	@$(python) -m monitoring --check
	@$(venv)/bin/hadolint images/*/Dockerfile* tests/docker/stand-ins/*/Dockerfile

install_clients = $(if $(OPENAI_CLIENTS),tests/packages.sh tests/openai_clients.lock $(OPENAI_CLIENTS) openai@7.57.0 @huggingface/inference@4.13.30)

test-unit: $(all) ## Tests without a server: SLOW=1; OPENAI_CLIENTS=.local/openai-clients adds clients of OpenAI's and other APIs
	@$(install_clients)
	@$(unit_tests) $(left_out_tests)

# Reads neither the developer's .env (tests/.env does not exist) nor make's command line, whose SYSTEMS may be 14 GB.
assemble_embedding = TRITON_SETTINGS_FILE=tests/.env TRITON_SETTINGS_NAMES= $(python) -m export

test-stack: $(all) ## Tests on the real Triton, Prometheus and Locust: SLOW=1; SLOW=2 TENSORFLOW=.local/tensorflow adds SavedModels, OPENAI_CLIENTS=.local/openai-clients clients of OpenAI's and other APIs
	@$(if $(TENSORFLOW),tests/packages.sh tests/tensorflow.lock $(TENSORFLOW))
	@$(install_clients)
	@$(assemble_embedding)
	@$(stack_tests) $(left_out_tests)

fuzz: $(all) ## Send a real stack bad requests over each protocol, and good ones beside them: FUZZ=10000 of them, FUZZ_SEED=18
	@$(assemble_embedding)
	@FUZZ=$(or $(FUZZ),10000) $(python) -m pytest --capture no tests/stack/test_fuzz.py

test-docker: $(all) ## Tests on a real Docker engine; if none answers, asks to install Docker system-wide, and stops it afterwards: INSTALL_DOCKER=1
	@tests/docker/run.sh

test-k8s: $(all) ## Tests on the cluster of KUBECONFIG, if KUBE_CONTEXT names its current context; in a namespace of their own
	@$(python) -m pytest --capture no --exitfirst --durations 15 tests/kubernetes

audit: $(all) ## Compare the pinned packages and Tritons with known vulnerabilities: OSV_DATABASE=all.zip if offline
	@$(python) -m scripts.audit

pictures: $(all) ## Draw README's pictures of the running stack and the newest report, in Chromium
	@tests/chromium.sh
	@$(python) -m tests.pictures

dashboards-json: $(all) ## Write the dashboards of monitoring/definitions for Grafana
	@$(python) -m monitoring

kubernetes-rules: ## Write Prometheus' rules for prometheus-operator
	@deploy/kubernetes/rules.sh >deploy/kubernetes/components/monitoring/objects/rules.yaml

# The second uv runs without pip's settings: the lock has PyPI's addresses, whatever index this machine installs from.
lock: ## Write uv.lock: the newest versions that the groups of pyproject.toml allow
	@scripts/make/uv.sh $(venv) --version
	@UV_SYSTEM_CERTS=1 $(venv)/bin/uv lock --upgrade

version: ## Print the version, and those that it pins, for a report of a bug
	@scripts/make/version.sh

# Delete the tools of tests first, because the stack deletes .local only if it is empty.
clean: ## Stop everything; remove what make created, except .env and the reports
	@rm -rf $(addprefix .local/,junit kubectl kubernetes-validate openai-clients tensorflow)
	@$(if $(is_installed),$(stack) clean)
	@rm -rf $(venv) $(venv).lock .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +
	@echo "removed $(venv) and the caches of this folder; kept .env and the reports"

help: ## Print this list
	@awk -f scripts/make/help.awk $(MAKEFILE_LIST)

.PHONY: up add remove down status logs smoke models generate package build build-cpu build-cuda build-neuron loadtest tune drill locust dashboards bench test lint test-unit test-stack fuzz test-docker test-k8s audit pictures dashboards-json kubernetes-rules lock version deploy-oci predict-oci destroy-oci clean help
