# Works on a bare machine with Python 3.11 or newer, make and a package index. Everything is installed into .venv.

PYTHON ?= python3
STORE ?= local
VENV := .venv
# /dev/null: the newest version of everything, as users install it.
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
# Compiling all of torch and its kind takes minutes; what is imported is compiled then.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --timeout 60 -c $(CONSTRAINTS)
PYTEST := $(BIN)/python -m pytest
# So it must be kept, whatever the environment says: tests start hundreds of processes that import torch.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-ray test quick full lint docs extras bench gpu clean servers

help:
	@echo 'make demo             train on 3 ranks, kill one, resume on 2, kill a loader's process, audit every delivery (a minute)'
	@echo 'make demo STORE=s3    the same, with the shards on a real S3 server; or STORE=s3://bucket/prefix'
	@echo 'make demo-ray         train on Ray over two shards, kill a worker, a shard and the coordinator, audit every batch'
	@echo 'make test             install what the tests need, and run them; ARGS="-k resume" goes to pytest'
	@echo 'make full             the tests that make test leaves out: whole matrices, many kills, other frameworks, tools'
	@echo 'make quick            only the tests that start no server and no ranks, and kill nothing'
	@echo 'make lint             ruff check, ruff format --check, mypy'
	@echo 'make docs             build the documentation site into build/site; bad links and missing docstrings fail'
	@echo 'make extras           install each extra alone beside a torch for CPUs, and import it; ARGS="bench ray" some of them'
	@echo 'make bench            penstock beside other loaders in some minutes; ARGS="--full" takes hours'
	@echo 'make gpu              the tests that need a GPU, and loaders that feed one; says so where there is none'
	@echo 'make clean            remove the virtual environment and everything that was made'

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo/run.py --store $(STORE)

demo-ray: $(VENV)/.demo-ray
	@$(BIN)/python examples/demo/ray_run.py

# The tests of a file run in one process, which makes their data and imports their libraries once.
PARALLEL := -n auto --maxprocesses=8 --dist loadfile

# Slow tests run after the others, four at a time, as many wait, and those of a file one after another; in the order of
# tests/conftest.py, long files first. 5: none was selected.
test: $(VENV)/.test servers
	$(PYTEST) $(PARALLEL) -m 'not slow and not full' $(ARGS) || [ $$? = 5 ]
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m 'slow and not full' $(ARGS) || [ $$? = 5 ]

# What `make test` leaves out: whole matrices of slow cases, soaks, kills at every point; and the loader's tests once
# more, with pipelines in processes of their own.
full: $(VENV)/.test servers
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m full $(ARGS)
	$(if $(ARGS),,PENSTOCK_TEST_PLACE=process $(PYTEST) -n 2 --dist loadfile -m 'not full and not gpu' tests/loader)

quick: $(VENV)/.test
	$(PYTEST) $(PARALLEL) -m 'not slow and not gpu' --hypothesis-profile=quick $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In an environment of its own: the site needs neither torch nor penstock. With --quiet, --strict would see no warning.
docs: $(VENV)-docs/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict
	@echo 'the site is in build/site; read it by: $(VENV)-docs/bin/python -m http.server --directory build/site'

# In environments of their own, which are removed. ARGS="--torch FILE" takes the torch from there, not from its index.
extras:
	$(PYTHON) devtools/extras.py $(ARGS)

gpu: $(VENV)/.bench $(VENV)/.test $(VENV)/.gpu
	$(BIN)/python -m devtools gpu $(ARGS)

bench: ARGS ?= --quick
bench: $(VENV)/.bench
	$(BIN)/penstock bench $(ARGS)

# A real S3 server, a real web server, a real Slurm and a real Prometheus, where Debian's apt and root are there.
# Elsewhere their tests say what to do.
servers:
	@if command -v radosgw >/dev/null && command -v nginx >/dev/null && command -v srun >/dev/null && \
	  command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v prometheus >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo 'installing the servers that the tests talk to (Ceph gateway, nginx, Slurm, Prometheus)'; \
	  tests/servers/s3_server.sh install && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light \
	    slurmctld slurmd slurm-client >/dev/null && \
	  tests/servers/prometheus.sh || \
	  echo 'they could not be installed; tests that need one will say so'; \
	else echo 'no apt or no root: tests that need an S3 or web server, Slurm or Prometheus will say what to do'; fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'penstock needs Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo 'making a virtual environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }

# One stamp for each set of extras: installing is skipped until what it depends on changes. HOLDS names the sets that
# are parts of the one installed: `make lint` and then `make test` install once.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing penstock[$(EXTRAS)] into $(VENV), which takes some minutes the first time'
	@$(PIP_INSTALL) -e '.[$(EXTRAS)]' $(BESIDES)
	@touch $@ $(HOLDS)

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.demo-ray: EXTRAS := demo,ray
$(VENV)/.demo-ray: HOLDS := $(VENV)/.demo
# Of the tests of MDS; no extra has it, as pyproject.toml explains.
$(VENV)/.test $(VENV)/.lint: BESIDES := 'mosaicml-streaming>=0.11; python_version < "3.14"'
$(VENV)/.test: EXTRAS := test
$(VENV)/.test: HOLDS := $(VENV)/.demo $(VENV)/.demo-ray
$(VENV)/.lint: EXTRAS := test,lint
$(VENV)/.lint: HOLDS := $(VENV)/.test $(VENV)/.demo $(VENV)/.demo-ray
$(VENV)/.bench: EXTRAS := bench,images
$(VENV)/.gpu: EXTRAS := images-cuda

# The requirements of the extra alone, which pip can install only with penstock.
DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

$(VENV)-docs/.docs: pyproject.toml constraints.txt
	@echo 'installing what builds the site into $(VENV)-docs'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'penstock needs Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	@$(subst $(BIN),$(VENV)-docs/bin,$(PIP_INSTALL)) $$($(PYTHON) -c '$(DOCS)')
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-docs demo-run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
