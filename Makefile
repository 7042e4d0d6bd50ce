# Nothing else to type: `make quickstart` and `make test` do all set-up by themselves and keep what they build.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
CONFIG ?= examples/configs/quickstart.toml
MODEL ?= smollm2-135m
AGENT ?= mini-swe-agent
TASKS := examples/tasks/quickstart
ARGS ?=
RL := .venv/bin/harness-rl

.PHONY: help setup openenv prepare quickstart test test-full accept accept-opencode accept-games examples soak lint bench bench-learner bench-sync bench-proxy lock clean distclean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## the Debian packages and both environments, if they are missing
	@scripts/setup.sh debian control torch

openenv: ## the environment with OpenEnv beside the control environment, if it is missing
	@scripts/setup.sh openenv

prepare: setup ## setup, the model, the sandbox's root file system, the agent's layer, the tasks
	@$(RL) models fetch $(MODEL) >/dev/null
	@$(RL) agents build $(AGENT) >/dev/null
	@$(RL) tasks quickstart $(TASKS) >/dev/null

quickstart: prepare ## the main job: a real model gets better inside a real agent (ARGS="--set run.short=true" for the short form)
	$(RL) warmup $(CONFIG) $(ARGS)
	$(RL) train $(CONFIG) $(ARGS)

test: prepare openenv ## the tests, every environment
	@scripts/test.sh -m "not full and not examples" $(ARGS)

test-full: prepare openenv ## the tests with the long matrices
	@scripts/test.sh $(ARGS)

examples: prepare openenv ## every example's script, its server a real process, through a warm start and two small steps
	.venv-openenv/bin/python -m pytest tests/examples $(ARGS)

accept: prepare ## the learning runs and their controls, three seeds (four hours and a half)
	.venv/bin/python tests/accept/quickstart.py $(ARGS)

accept-opencode: prepare ## stock opencode learns the quickstart's tasks (an hour and a half)
	$(RL) agents build opencode >/dev/null
	.venv/bin/python tests/accept/opencode.py $(ARGS)

accept-games: prepare openenv ## are the OpenEnv games learned? echo, catch, Wordle (an hour and a half)
	.venv/bin/python tests/accept/games.py $(ARGS)

soak: prepare ## two hours of the quickstart with a process killed every five minutes
	.venv/bin/python tests/accept/soak.py $(ARGS)

lint: setup ## style and types
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: prepare ## thread shares of engine and learner on this machine
	.venv/bin/python -m harness_rl.bench.threads $$($(RL) models fetch $(MODEL)) .make/threads.md $(ARGS)

bench-learner: prepare ## padded batches, plain packing and prefix trees on the same rows; the LM head's memory (ARGS="--rounds 5")
	.venv-torch/bin/python -m harness_rl.bench.learner $$($(RL) models fetch $(MODEL)) tests/reports/bench_learner.md $(ARGS)

bench-sync: prepare ## an update of the weights beside the least that it could cost, and how long each mode stops the engine
	.venv-torch/bin/python -m harness_rl.bench.sync $$($(RL) models fetch $(MODEL)) tests/reports/bench_sync.md $(ARGS)

bench-proxy: setup openenv ## the capture proxy beside OpenEnv's capture server, and a direct connection, on one cheap engine
	.venv/bin/python -m harness_rl.bench.capture tests/reports/bench_proxy.md $(ARGS)

lock: setup ## write requirements/*.lock from the present environments
	@scripts/lock.sh

clean: ## caches of the tools and build leftovers
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find harness_rl proxy tests examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and the environments
	rm -rf .venv .venv-torch .venv-openenv .make
