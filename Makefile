# Settings are variables: make run RUN_MODE=dp WORLD_SIZE=3 LAB_STEPS=50
.DEFAULT_GOAL := help
.PHONY: help run quick fit explain plan test test-all frameworks coverage lint docs lock bench gpu engines build down clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F '\t' '{printf "make %-10s %s\n", $$1, $$2}'
	@echo "modes (RUN_MODE): $$(find experiments -mindepth 1 -maxdepth 1 -name '[a-z]*' | sed 's:.*/::; s:\.py$$::' | sort | tr '\n' ' ')"

run: ## start WORLD_SIZE ranks of RUN_MODE, in containers if a Docker engine answers
	@DISTLAB_STARTED_BY="make run" ./run || { code=$$?; echo "exit code $$code" >&2; exit $$code; }

quick: ## the same with a small model and 5 steps, about 20 s after the installation
	@LAB_WIDTH="$${LAB_WIDTH:-32}" LAB_DEPTH="$${LAB_DEPTH:-4}" LAB_STEPS="$${LAB_STEPS:-5}" $(MAKE) --no-print-directory run

fit: ## train a model that does not fit in a rank's memory with dp, but does with fsdp
	@./compose/fit.sh

explain: ## print the lesson of RUN_MODE without a run; with LAB_BUG what breaks, and which check fails
	@./run explain

plan: ## compare all strategies on paper, and recommend one: make plan PLAN="--params 7B --gpus 64 --gpu-memory 80GB"
	@./run plan $(PLAN)

# Containers come after all else: the kernel gives all of them together the share of one process, so beside a pool of
# ranks a run of 9 s took 95, and bounds were missed that hold for users. The image is built meanwhile: pip waits for
# the network. Tests of the folders POOL call functions on ranks that are warm, compute, and know no heartbeat: three
# workers fill two cores. All others start processes that wait for each other: four workers leave a third of two cores
# to the heartbeats of their ranks. Slow tests run beside the quick ones, which have made the runs that they read.
TESTS = .venv/bin/python -m pytest --dist loadgroup --no-loadscope-reorder
POOL = tests/experiments tests/techniques tests/lab/checkpoint tests/lab/measure tests/lab/verify tests/lab/workload \
	tests/test_coverage_runs.py
QUICK = and not slow

test: ## test every claim once, in containers too if a Docker engine answers
	./install dev
	{ ! docker info || docker compose build --quiet; } >/dev/null 2>&1 & \
	code=0; $(TESTS) -n 4 -m "not compose $(QUICK)" $(POOL:%=--ignore=%) || code=$$?; \
	$(TESTS) -n 3 -m "not compose $(QUICK)" $(POOL) || code=$$?; wait; \
	$(TESTS) -n 2 -m "compose $(QUICK)" || code=$$?; exit $$code

test-all: ## the same, and the slow tests: faults in containers, and every documented command
	./install docs
	$(MAKE) --no-print-directory test QUICK=

frameworks: ## test check, prove and drill with accelerate, Trainer, Lightning and torchdata, in .venv-frameworks
	./install frameworks
	.venv-frameworks/bin/python -m pytest -n 2 --dist loadgroup tests/frameworks

coverage: ## run the tests, and list the lines of every process that no test runs; takes a third longer
	./install dev
	.venv/bin/coverage erase
	.venv/bin/coverage run -m pytest -n 2 --dist loadgroup
	.venv/bin/coverage combine --quiet
	.venv/bin/coverage report

lint: ## run every linter; changes nothing
	./install dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/hadolint Dockerfile
	.venv/bin/shellcheck run install compose/*.sh workers/*.sh engines/*/*.sh .ci/run .ci/engines
	.venv/bin/yamllint --strict .
	@if command -v actionlint; then actionlint; else echo "actionlint is not installed: .github/workflows is checked in the public CI alone"; fi

docs: ## build the site in build/site/html; needs no network after the installation
	./install docs
	.venv-docs/bin/python docs/site/build.py

lock: ## write compose/requirements.lock again: the image's packages except torch, with their hashes
	./install dev
	printf 'torch; sys_platform == "none"\n' >.venv/without-torch
	.venv/bin/uv pip compile pyproject.toml --group image --override .venv/without-torch --constraints constraints.txt \
		--no-emit-package torch --python-version 3.11 --universal --generate-hashes --no-annotate --quiet \
		--custom-compile-command "make lock" --output-file compose/requirements.lock

bench: ## measure the time of each strategy relative to PyTorch's own, with targets
	./install dev
	.venv/bin/python -m benchmarks

gpu: ## run every mode on one GPU, and measure memory, steps and failures: 5 minutes, results in runs/gpu
	python3 -m benchmarks.gpu

engines: ## test torchrun's agents and Slurm on simulated nodes, with killed ranks and nodes; needs root
	./install dev
	.venv/bin/python -m benchmarks.engines

build: ## build the image
	docker compose build

down: ## remove the containers of a run
	WORLD_SIZE=8 docker compose down --remove-orphans

clean: ## remove the runs in runs/ that are older than 7 days, after asking
	@./run report --clean 7
