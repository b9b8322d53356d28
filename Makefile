# Every target installs what it needs; on a fresh machine start with `make test` or `make train`.
#
# Settings: PYTHON=python3.12        the Python to build the environment from
#           ACCELERATOR=cpu|cuda     which vLLM to install (default: cuda when nvidia-smi lists a GPU)
#           VLLM=0.33                its version on GPUs, if requirements/ has a lock for it (default: 0.32)
#           VENV=.venv               where the environment is
#           SKIP_INSTALL=1           use the environment in VENV without installing (containers, conda)
#           RECIPE=gsm8k_ppo         recipe of `make reproduce` (docs/recipes.md)
#           ARGS="..."               settings for training, for example ARGS="algorithm=dr_grpo optimizer.lr=1e-4"
#           NUM_PROCESSES=2          ranks of train-zero3
#           TASK=chain               of `make train`: demo (the default), chain, reverse, squares, or another file of
#                                    configs/experiment; of `make real`: names (the default), words, family, calculator
#           PYTEST_ARGS="..."        for the test targets, for example PYTEST_ARGS="-k packing -x"
#           TEST_WORKERS=3           processes of `make test` and `make test-long`; 0: one, in this terminal (for a debugger)
#           BASE=HEAD~1              of `make check`: the commit to compare with; default: where the branch left main
#           FILES=30                 of `make check`: at most this number of files of tests
#           CHECK_SECONDS=80         of `make check`: no test begins later

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
ARGS ?=
RECIPE ?=
PYTEST_ARGS ?=
NUM_PROCESSES ?= 2
TASK ?=
# Chosen here, so that the report is about this run: another one may move runs/latest meanwhile.
RUN_NAME := real-$(shell date +%m%d-%H%M%S)-$(shell echo $$$$)
typed = $(patsubst $(1)=%,%,$(lastword $(filter $(1)=%,$(subst ",,$(subst ',,$(ARGS))))))
TEST_WORKERS ?= 3
BASE ?=
FILES ?=
CHECK_SECONDS ?=
EXPERIMENT = $(if $(filter experiment=%,$(ARGS)),,experiment=$(or $(TASK),demo))
NEEDS = $(if $(filter-out demo chain reverse squares,$(TASK))$(filter experiment=%,$(ARGS)),install,model)
BENCH ?= $(basename $(notdir $(wildcard benchmarks/*.py)))
BIN := $(VENV)/bin
AUDIT := .venv-audit
CUDA_VENV ?= .venv-cuda
NEWEST_VENV ?= .venv-newest
ENVIRONMENTS := .venv-environments
AGENTS := "langgraph<2" "langchain-openai<2" "openai-agents<0.25" "pydantic-ai-slim[openai]<3" "smolagents[openai]<2"
# Programs of the environment are called by name: ninja by torch, accelerate by scripts.
export PATH := $(abspath $(BIN)):$(PATH)
export PYTHON ACCELERATOR VENV VLLM

.PHONY: help install environments model train train-zero3 real reproduce check test test-long test-unit test-v2 test-slow test-cuda-wheel lint format plot report bench gpu-check docs lock sbom audit newest clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: ## Set up .venv (part of every target; instant when nothing changed)
ifndef SKIP_INSTALL
	@bash scripts/install.sh
endif

# One interpreter each for packages that do not fit beside Lockstep's, or beside each other. That of agents sees the
# packages of VENV, as if those of the agents were installed there.
environments: install ## Packages of other environments and agents, beside VENV, for their tests, which are skipped without
	@for each in "games openenv-core>=0.3,<0.4 textarena==0.7.4" "tasks verifiers>=0.4,<0.5 uv"; do \
		set -- $$each; directory="$(ENVIRONMENTS)/$$1"; shift; \
		$(or $(PYTHON),python3) -m venv "$$directory"; \
		"$$directory/bin/python" -m pip install --quiet --disable-pip-version-check "$$@"; \
	done
	@purelib() { "$$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	$(BIN)/python -m venv --without-pip "$(ENVIRONMENTS)/agents"; \
	echo "import site; site.addsitedir('$$(purelib $(VENV))')" > "$$(purelib $(ENVIRONMENTS)/agents)/beside.pth"; \
	$(ENVIRONMENTS)/agents/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(AGENTS)

model: install ## Make the small demo model, if it is missing
	@$(BIN)/python scripts/make_demo_model.py --task $(or $(filter chain reverse squares,$(TASK)),calculator)

train: $(NEEDS) ## Train the demo model to use a calculator, or TASK=chain|reverse|squares|...; settings in ARGS
	$(BIN)/python scripts/train.py $(EXPERIMENT) $(ARGS)

train-zero3: $(NEEDS) ## Train on NUM_PROCESSES=2 processes with DeepSpeed ZeRO-3
	$(BIN)/accelerate launch --config_file configs/accelerate/zero3.yaml --num_processes $(NUM_PROCESSES) scripts/train.py $(EXPERIMENT) $(ARGS)

real: install ## Train a real model, SmolLM2-135M, on two CPU cores; TASK=names|words|family|calculator, ARGS
	$(BIN)/python scripts/make_real_model.py $(if $(TASK),--task $(TASK))
	$(BIN)/python scripts/train.py experiment=real$(if $(filter-out names,$(TASK)),_$(TASK)) run_name=$(RUN_NAME) $(ARGS)
	$(BIN)/python scripts/report.py $(or $(call typed,run_root),runs)/$(or $(call typed,run_name),$(RUN_NAME))

ifeq ($(RECIPE),demo_calculator)
reproduce: model
endif
reproduce: install ## Reproduce a published result and judge it; RECIPE=<name>, without it a list; ARGS for settings
	@$(BIN)/python -m lockstep reproduce $(RECIPE) $(ARGS)

check: install ## While editing, at most 90 s: lint the changed files, run the unit tests that depend on them
	@$(BIN)/python -m scripts.project.check_change $(if $(BASE),--base $(BASE)) $(if $(FILES),--files $(FILES)) $(if $(CHECK_SECONDS),--seconds $(CHECK_SECONDS))

test: MARKED = not long and
test: install ## Unit tests, and integration tests of the core, without a GPU; PYTEST_ARGS for pytest
test-long: MARKED = long and
test-long: install ## The other tests of continuous integration: engines, ranks, attacks
test test-long:
	@started=$$SECONDS; status=0; \
	$(BIN)/python -m pytest -m "$(MARKED) not slow and not gpu" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 tests $(PYTEST_ARGS) || status=$$?; \
	echo "make $@: $$((SECONDS - started)) s in all"; exit $$status

test-unit: install ## Unit tests only
	$(BIN)/python -m pytest -m "not slow and not gpu" tests/unit $(PYTEST_ARGS)

test-v2: install ## Tests of engines with vLLM's V2 model runner, as GPUs use it, in Triton's interpreter
	PYTHONPATH=$(CURDIR)/tests/fixtures/v2_on_cpu $(BIN)/python -m pytest -m "v2 and not slow" -n 2 --dist loadfile --no-loadscope-reorder tests/integration $(PYTEST_ARGS)

test-slow: install ## Tests that take minutes each; hours in all
	$(BIN)/python -m pytest -m "slow and not gpu" tests $(PYTEST_ARGS)

# The CUDA environment runs the tests itself, so that no other one is needed.
test-cuda-wheel: ## Tests with the CUDA builds, without a GPU: 10 GB in CUDA_VENV=.venv-cuda, made on first use
	@ACCELERATOR=cuda VENV=$(CUDA_VENV) bash scripts/install.sh
	LOCKSTEP_CUDA_PYTHON=$(abspath $(CUDA_VENV)/bin/python) $(CUDA_VENV)/bin/python -m pytest tests/integration/test_cuda_wheel.py $(PYTEST_ARGS)

lint: install ## Style, formatting, English and types, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/project/check_prose.py
	$(BIN)/hadolint Dockerfile
	$(BIN)/pyright --pythonpath $(BIN)/python

format: install ## Apply the formatting and the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

plot: install ## Draw the curves of a run; ARGS="runs/<name>" or several, default runs/latest
	$(BIN)/python scripts/plot.py $(ARGS)

report: install ## One HTML page about a run; ARGS="runs/<name>", default runs/latest
	$(BIN)/python scripts/report.py $(ARGS)

bench: install ## Run the programs in benchmarks/; BENCH=head for one of them, ARGS for its options
	@status=0; for name in $(BENCH); do \
		started=$$SECONDS; echo "benchmarks/$$name.py"; \
		$(BIN)/python "benchmarks/$$name.py" $(ARGS) || { status=1; echo "benchmarks/$$name.py failed"; }; \
		echo "benchmarks/$$name.py: $$((SECONDS - started)) s"; \
	done; exit $$status

gpu-check: install ## Check every path that needs a GPU, on this machine; ARGS="--only NAME" or "--rehearse"
	$(BIN)/python -m lockstep gpu-check $(ARGS)

docs: install ## Write the generated pages of docs/ from the code, and build the site of docs/ into site/
	$(BIN)/python -m scripts.project.list_settings
	$(BIN)/python -m scripts.project.map_code
	$(BIN)/python -m scripts.project.list_models
	$(BIN)/python -m scripts.project.list_environments
	$(BIN)/python -m scripts.project.list_stability
	$(BIN)/python -m scripts.project.list_licenses
	$(BIN)/python -m scripts.project.list_memory
	$(BIN)/python -m scripts.project.list_recipes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build # not --quiet: that hides warnings from strict mode, too

lock: ## Write requirements/ from pyproject.toml (needs uv and a network); ARGS="--upgrade", "--upgrade-package NAME"
	@command -v uv >/dev/null || { echo "make lock: uv was not found. Install it, for example: pipx install uv" >&2; exit 1; }
	uv run --quiet --no-project --python ">=3.11,<3.14" --with packaging python -m scripts.project.lock $(ARGS)

# Not in VENV: the tools need packages of their own.
$(AUDIT)/installed: requirements/audit.txt | install
	$(BIN)/python -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

sbom: $(AUDIT)/installed ## Write the bills of materials dist/sbom-*.json (CycloneDX) of the locked packages
	@mkdir -p dist
	cat requirements/cpu.txt requirements/torch-cpu.txt | $(AUDIT)/bin/cyclonedx-py requirements - --pyproject pyproject.toml --output-reproducible -o dist/sbom-cpu.json
	$(AUDIT)/bin/cyclonedx-py requirements requirements/cuda.txt --pyproject pyproject.toml --output-reproducible -o dist/sbom-cuda.json

audit: $(AUDIT)/installed ## Look up known vulnerabilities of the locked packages (needs a network)
	@$(BIN)/python -m scripts.project.audit_packages $(AUDIT)/bin/pip-audit $(ARGS)

# Apart from VENV, which has the locked versions.
newest: ## Try the newest version of every dependency in NEWEST_VENV=.venv-newest, and say what breaks (needs uv, a network)
	@command -v uv >/dev/null || { echo "make newest: uv was not found. Install it, for example: pipx install uv" >&2; exit 1; }
	@ACCELERATOR=cpu VLLM= VENV=$(NEWEST_VENV) bash scripts/install.sh
	@rm $(NEWEST_VENV)/.lockstep-installed # so that the next call begins with the locks again
	$(NEWEST_VENV)/bin/python -m scripts.project.newest $(abspath $(NEWEST_VENV))/bin/python

clean: ## Remove caches and build output; keeps .venv, models and runs
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name '.venv*' -prune -o -name .git -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
