# Two commands need nothing but Python and make:  make demo   make test
# Both install torch's CUDA build with NVIDIA's packages, as `pip install torch` does: a download of
# 3 GB, without which they fail.
PYTHON ?= python3
VENV   ?= .venv
PY     ?= $(VENV)/bin/python
PYTEST_ARGS ?= -n 2 --dist loadgroup
# Tests start hundreds of Python processes: without cached bytecode, each takes a fifth longer.
unexport PYTHONDONTWRITEBYTECODE

# A stamp names the extra it stands for and is newer than pyproject.toml: nothing is
# reinstalled while pyproject.toml has not changed.
STAMP_DEMO := $(VENV)/.stamp-demo
STAMP_DEV  := $(VENV)/.stamp-dev

.PHONY: help demo test venv lint types contracts unit fix coverage properties test-torch test-python test-gpu bench-gpu test-pycuda test-integrations mutants docs docs-images clean sanitize dist

help:
	@echo "make demo       record an example training run on a simulated GPU and print its report"
	@echo "make test       lint, types, import contracts and tests (installs the dev extra)"
	@echo "make fix        format and auto-fix"
	@echo "make test-torch TORCH=2.6.0  the tests with another version of torch"
	@echo "make test-python PY_VERSION=3.13  what depends on Python's version, with another one"
	@echo "make test-pycuda  pycuda's real code against a fake driver (builds it; two minutes)"
	@echo "make test-integrations  with the real Lightning, Ray, TRL, W&B and MLflow (installs them)"
	@echo "make sanitize   the C runtime under AddressSanitizer and UBSan, by gcc (five minutes)"
	@echo "make dist       the sdist and the wheel, checked, and the wheel tried without a compiler"
	@echo "make mutants    how many small faults the tests notice, on a sample (an hour)"
	@echo "make test-gpu   only the tests that need a CUDA device"
	@echo "make bench-gpu  measure on the GPU of this machine: truth files, overheads, speeds (13 minutes)"
	@echo "make properties the property tests, on new random examples"
	@echo "make docs       the generated parts of the documentation, and the outputs that it shows"
	@echo "make docs-images  its pictures, those that are out of date"
	@echo "make coverage   tests with a coverage report as HTML"
	@echo "make clean      remove .venv and caches"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP_DEMO): pyproject.toml | $(VENV)/bin/python
	@test -f $(STAMP_DEV) && test $(STAMP_DEV) -nt pyproject.toml || $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

# Without --no-compile, pip compiles all 14,000 files: 38 s of processor time, by a sample of 500.
$(STAMP_DEV): pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	@touch $@

venv: $(STAMP_DEV)

demo: $(STAMP_DEMO)
	@rm -rf demo.gpuprobe
	$(VENV)/bin/gpuprobe run --gpu t4 --level trace --output demo.gpuprobe examples/train_gpt.py --steps 8
	@echo
	$(VENV)/bin/gpuprobe report demo.gpuprobe

lint: $(STAMP_DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell *.md gpuprobe tests benchmarks docs examples

types: $(STAMP_DEV)
	$(VENV)/bin/mypy

contracts: $(STAMP_DEV)
	$(VENV)/bin/lint-imports

unit: $(STAMP_DEV)
	$(PY) -m pytest $(PYTEST_ARGS)

test: lint types contracts unit

# In an environment of its own, in which the version of torch is that of TORCH.
TORCH ?= 2.6.0
VENV_TORCH = .venv-torch-$(TORCH)

test-torch:
	$(PYTHON) -m venv $(VENV_TORCH)
	$(VENV_TORCH)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' torch==$(TORCH)
	$(VENV_TORCH)/bin/python -m pytest $(PYTEST_ARGS)

# In an environment of its own, with the interpreter of that name: frames, and that nothing changes
# a program.
PY_VERSION ?= 3.13
VENV_PYTHON = .venv-python-$(PY_VERSION)

test-python:
	python$(PY_VERSION) -m venv $(VENV_PYTHON)
	$(VENV_PYTHON)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(VENV_PYTHON)/bin/python -m pytest $(PYTEST_ARGS) tests/test_frame_variables.py \
		tests/test_unchanged_programs.py tests/hazards/test_hazard_corpus.py tests/sampler
	$(VENV_PYTHON)/bin/python benchmarks/unchanged_programs.py

# Builds pycuda from source, and runs its real code against a fake driver.
test-pycuda: $(STAMP_DEV)
	$(PY) tests/support/pycuda_check.py .venv-pycuda

# With the real Lightning, Ray, TRL, W&B and MLflow, which it installs.
test-integrations: $(STAMP_DEV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[integrations]'
	GPUPROBE_TEST_INTEGRATIONS=1 $(PY) -m pytest -n 0 -m "" -rs tests/integrations

sanitize: $(STAMP_DEV)
	$(PY) tests/support/sanitized_runtime.py

# In an environment of its own: build and twine are not needed for anything else.
dist:
	rm -rf dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*
	.venv-dist/bin/python packaging/check_wheel.py dist/*.whl

# With a CUDA build of torch in the environment that PYTHON names: PY=python3 make test-gpu
# The same programs on the GPU and on a simulated one: record_truth.py of make bench-gpu, with --native
# and --compare.
test-gpu:
	$(PY) -m pytest -m gpu -q

# Faults that Cosmic Ray makes in a copy of the tree, on a sample: see the script.
mutants: $(STAMP_DEV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[mutants]'
	$(PY) benchmarks/mutation_score.py

# What it writes is for tests/recorded/ and docs/verification/on-a-gpu.md. PYTHONPATH: the environment
# with the CUDA build of torch need not have gpuprobe installed. Later parts run even if an
# earlier one fails.
bench-gpu:
	PYTHONPATH=. $(PY) benchmarks/gpu/record_truth.py; truth=$$?; \
	PYTHONPATH=. $(PY) benchmarks/gpu/overhead.py; cost=$$?; \
	PYTHONPATH=. $(PY) benchmarks/gpu/calibrate.py; speed=$$?; \
	test $$truth -eq 0 && test $$cost -eq 0 && test $$speed -eq 0

# `make test` draws the same examples each time; these are new ones in each run.
properties: $(STAMP_DEV)
	$(PY) -m pytest $(PYTEST_ARGS) -m hypothesis --hypothesis-profile=explore

docs: $(STAMP_DEV)
	$(PY) docs/generate.py --pages

docs-images: $(STAMP_DEV)
	$(PY) docs/pictures.py

coverage: $(STAMP_DEV)
	$(PY) -m pytest $(PYTEST_ARGS) --cov=gpuprobe --cov-report=term:skip-covered --cov-report=html

fix: $(STAMP_DEV)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis demo.gpuprobe
