# Every command of the project. `make` alone lists them; each one sets up what it needs and is fast the second time.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
CLUSTER := $(BIN)/python -m harness
# its advertisement of a successor is not a warning
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
# not among the installed packages
CODEGEN := PYTHONPATH=operator:trainer_image $(BIN)/python -m grpo_codegen
# Mypy keeps what it knows of a module by the hash of its text, so a new clone takes it over: 2 s instead of 34.
MYPY_CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/grpo-operator/mypy
# Two cores: one thread for each of two training processes. No hub here, and nothing may try to reach one.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Images of Python set it. Each process of the tests would compile this project and its libraries again.
unexport PYTHONDONTWRITEBYTECODE
# a cluster that is lent to the tests has its own programs
TOOLS := $(if $(GRPO_TEST_KUBECONFIG),,tools)
ALL_TOOLS := $(if $(GRPO_TEST_KUBECONFIG),,tools-all)
# `make test` and `make test-all`: one of the parts of tests/runs.py; `make flaky-check`: files or ids of tests
PARTS := lint unit memory gpu-kit trainer kueue chaos pictures release upgrade api nodes e2e coverage
PART ?=
TESTS ?=
NODES ?= 2
GPUS_PER_NODE ?= 8
# `make soak`: a seed that is new every day
SEED ?= $(shell date +%Y%m%d)
MINUTES ?= 30
FAULTS ?= 100
ONLY ?=
# `make demo` on a cluster of one's own: the trainer's image, and the operator's where it doesn't lie beside it
IMAGE ?=
OPERATOR_IMAGE ?=
# `make pictures`
TO ?= pictures-output
STORY ?=
# `make release`: where the images will be, where the files; some of the images
REGISTRY ?=
DOWNLOADS ?=
IMAGES ?=
# `make publish`
INDEX ?= https://upload.pypi.org/legacy/
KEY ?= cosign.key
# `make bench`
NAME ?=
# `make gpu`: options of `python -m grpo_acceptance`; its time includes that of installing the environment
OPTIONS ?=
BEGAN := $(shell date +%s)
# `make gpu-kit`: the other machine's Python
KIT_PYTHON ?= 3.12

.PHONY: help venv demo check test test-all flaky-check soak chaos lint docs codegen pictures cluster cluster-down images bench tools tools-all gpu gpu-kit release publish

help: ## list the commands
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)
	@echo; echo "PART is one of: $(PARTS)"

##@ Start here

ifdef CONTEXT
# with nothing but python3, kubectl and helm
demo:
	@$(PYTHON) examples/demo/anywhere.py --context "$(CONTEXT)" --image "$(IMAGE)" --operator-image "$(OPERATOR_IMAGE)" $(if $(NAMESPACE),--namespace "$(NAMESPACE)")
else
demo: venv ## one GRPOJob from `kubectl apply` to Succeeded, on a real Kubernetes (CONTEXT=… IMAGE=… for your own cluster)
	@$(BIN)/python -m examples.demo
endif

test: venv $(TOOLS) ## what CI runs, in about 15 minutes: lint and all tests but slow ones (PART=… for some)
	@$(BIN)/python -m tests.runs test --part "$(PART)"

##@ Develop

check: venv ## lint, types, layers, generated files and pure tests, in 5 minutes: no root, no Go, no torch
	@$(BIN)/python -m tests.runs check

test-all: venv $(ALL_TOOLS) ## every test, with coverage and its limit, in 100 minutes, or one part of it (PART=…)
	@$(BIN)/python -m tests.runs test-all --part "$(PART)"

flaky-check: venv $(TOOLS) ## ten times the realtime tests that differ from main, on one busy core (TESTS=…)
	@$(BIN)/python -m tests.flaky_check $(TESTS)

lint: venv ## ruff, mypy, import layers, freshness of generated files, the site's links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@test -e .mypy_cache || cp -r $(MYPY_CACHE) .mypy_cache 2>/dev/null || rm -rf .mypy_cache
	$(BIN)/mypy
	@mkdir -p $(dir $(MYPY_CACHE)); part=$$(mktemp -d $(MYPY_CACHE).XXXX); { cp -r .mypy_cache/. $$part && \
	  rm -rf $(MYPY_CACHE) && mv $$part $(MYPY_CACHE); } 2>/dev/null || rm -rf $$part  # another lint does the same
	PYTHONPATH=operator:trainer_image $(BIN)/lint-imports --no-logo
	$(CODEGEN) --check
	$(MKDOCS) --quiet

codegen: venv ## write the generated files: CRD, chart copy, dashboards, alert rules, documents
	$(CODEGEN)

docs: venv ## build the documentation site into site-output, strictly: no dead link, no request to another host
	$(MKDOCS)

venv: .venv/.stamp ## the virtual environment with the CLI `grpo` and every test tool
.venv/.stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv .venv; }
	@echo "installing the virtual environment (the training stack is 6 GB; a minute or two)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv
	@$(BIN)/uv pip install -q -p $(BIN)/python -c constraints.txt -e '.[operator,trainer,dev,docs]'
	@touch $@

# Ranks that start together would each compile torch and TRL, 24 s of CPU, for themselves.
.venv/.bytecode: .venv/.stamp
	@$(BIN)/python -W ignore -c "import logging; logging.disable(); import deepspeed, peft, trl.trainer.grpo_trainer"
	@touch $@

tools: venv .venv/.bytecode ## build the programs, packages and images that `make test` needs, before anything else wants the cores
	@$(CLUSTER) tools
	@$(BIN)/python -m examples.demo.prepare

tools-all: venv ## those of `make test-all`
	@$(CLUSTER) tools test-all
	@PYTHONPATH=operator:trainer_image $(BIN)/python -m tools.pictures --page
	@$(BIN)/python -m tools.gpu bare-machine
	@$(BIN)/python -m examples.demo.prepare

##@ Search for rare defects, and measure

soak: venv $(ALL_TOOLS) ## generated tests, ten times the cases and new ones in each round, until time is up (SEED=… MINUTES=30)
	@for ((seed = $(SEED); seed == $(SEED) || SECONDS < 60 * $(MINUTES); seed++)); do echo "== SEED=$$seed"; \
	  $(BIN)/pytest tests/unit tests/trainer tests/integration -m 'hypothesis or seeded or soak' --hypothesis-profile=soak --hypothesis-seed=$$seed \
	    -q -n 2 --dist load || { echo "failed; the same again: make soak SEED=$$seed MINUTES=0"; exit 1; }; done

chaos: venv ## faults of all kinds on a real control plane, each printed as it strikes (SEED=… FAULTS=100 ONLY=regex)
	$(BIN)/python -m tests.integration.chaos --seed $(SEED) --faults $(FAULTS) --only "$(ONLY)"

bench: venv ## list the benchmarks, or run one (NAME=… OPTIONS=…)
	@$(BIN)/python -m benchmarks $(NAME) $(OPTIONS)

pictures: venv ## draw the dashboards of all stories into a folder, with Grafana's own components (TO=folder STORY=name)
	@PYTHONPATH=operator:trainer_image $(BIN)/python -m tools.pictures --to "$(TO)" $(if $(STORY),--story "$(STORY)")

##@ A Kubernetes on this machine

cluster: venv ## start a real Kubernetes with the operator on this machine and print how to use it (NODES=2 GPUS_PER_NODE=8)
	@$(CLUSTER) up --operator --nodes $(NODES) --gpus-per-node $(GPUS_PER_NODE)

cluster-down: venv ## stop it and leave nothing behind
	@$(CLUSTER) down

images: venv ## build the operator's and the trainer's image
	@$(CLUSTER) images

##@ GPUs

gpu: venv ## the acceptance run on this machine's GPUs, in 9 minutes; the result goes into docs/internals/gpu.md (OPTIONS=…)
	@$(BIN)/python -m tools.gpu accept --output gpu-output --used $$(($$(date +%s) - $(BEGAN))) $(OPTIONS)

gpu-kit: venv ## what a bare GPU machine lacks for it, as wheels, with a script `run` (KIT_PYTHON=3.12 KIT_ENGINE=90)
	@$(BIN)/python -m tools.gpu kit --output gpu-kit --python $(KIT_PYTHON) $(if $(KIT_ENGINE),--engine $(KIT_ENGINE))

##@ Publish

release: TO = release-output
release: venv ## build and check what a release publishes, in a folder; pushes nothing (REGISTRY=… DOWNLOADS=https://…)
	@$(BIN)/python -m tools.release --to "$(TO)" $(if $(REGISTRY),--registry "$(REGISTRY)") \
	  $(if $(DOWNLOADS),--downloads "$(DOWNLOADS)") $(if $(IMAGES),--images $(IMAGES))

publish: TO = release-output
publish: venv ## push and sign what `make release` left, to its registry and a package index (TO=… INDEX=… KEY=cosign.key)
	@$(BIN)/python -m tools.release.publish "$(TO)" --index "$(INDEX)" --key "$(KEY)"
