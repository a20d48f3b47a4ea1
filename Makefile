# `make demo` and `make test` need only Python 3.11+, make and a package index: they create .venv if it is missing.
#
#   PYTHON=python3.12                           interpreter for a new .venv; default: the first suitable one
#   TORCH="torch==2.13.0+cpu --extra-index-url <PyTorch's CPU index>"
#                                               another PyTorch: a requirement, a wheel file, pip options
#   ARGS="-k losses"                            further arguments for test, demo and bench
#   WORKERS=4                                   number of parallel test processes
#   MINUTES=10                                  duration of make soak and make fuzz
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) are respected.

VENV  := .venv
OWNED := $(VENV)/.made-by-rather
BASE  := $(VENV)/.installed
DEV   := $(VENV)/.installed-dev
PIP   := $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST  := $(VENV)/bin/python -m pytest -q
MKDOCS  := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
WORKERS ?= 2

# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# A virtual environment contains its own absolute path, and the stamp names its PyTorch: after the folder was moved,
# or with another TORCH=, it is created again.
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)
MADE_HERE    := $(shell sed -n 1p $(BASE) 2>/dev/null)
MADE_TORCH   := $(shell sed -n 2p $(BASE) 2>/dev/null)
ifneq ($(MADE_HERE),$(CURDIR))
FRESH := yes
endif
ifdef TORCH
ifneq ($(TORCH),$(MADE_TORCH))
FRESH := yes
endif
endif
ifdef FRESH
.PHONY: $(BASE)
endif

.PHONY: help install demo test test-wide test-all test-gpu test-faults test-engines soak fuzz check coverage docs notebook screenshots sbom release bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train a tiny model on this machine and see how its answers change"
	@echo "make test     run the test suite"
	@echo "make test-wide    the further cells of the test matrices, without the tests of make test; PART=1/4: a part"
	@echo "make test-all     make test, then make test-wide"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make test-faults  kill a run at every point in every layout; takes most of an hour"
	@echo "make test-engines the same run on DeepSpeed and Megatron-Core, which it installs into .venv-engines"
	@echo "make soak     break runs at random for an hour; MINUTES=10 for less"
	@echo "make fuzz     damaged inputs for the commands, for ten minutes; MINUTES=60 for more"
	@echo "make check    ruff, mypy --strict and bandit on the package, pip-audit on the installed packages, docs and links"
	@echo "make coverage run the test suite and print which lines it executes; ARGS=tests/data for a part"
	@echo "make docs     build the documentation site: site/index.html"
	@echo "make notebook run the cells of examples/align_in_ten_minutes.ipynb again and store their outputs"
	@echo "make screenshots  take the pictures of the docs again; needs Chromium"
	@echo "make sbom     sbom.json: a list of all installed packages (CycloneDX)"
	@echo "make release  check and build wheel and source distribution: dist/; VERSION=0.2.0, TAG=1, DRAFT=1: CONTRIBUTING.md"
	@echo "make bench    list the benchmarks; make bench NAME=<one of them> runs it"
	@echo "make install  create $(VENV) with the command 'rather' (the other targets do it when needed)"
	@echo "make clean    remove $(VENV), if make created it, and the caches of the tools"

install: $(BASE)
	@echo "Ready: $(VENV)/bin/rather --help"

demo: $(BASE)
	@$(VENV)/bin/rather demo $(ARGS)

# Every test that must run alone is a wide one (tests/conftest.py): make test is one run of pytest.
test: $(DEV)
	@$(PYTEST) -n $(WORKERS) --no-loadscope-reorder $(ARGS)

# bench/results/wide.json keeps what ran, when and on which commit.
test-wide: $(DEV)
	@$(VENV)/bin/python -m tests.run_wide $(PART) --workers $(WORKERS) $(ARGS)

test-all: $(DEV)
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-wide

test-gpu: $(DEV)
	@RATHER_TEST_GPU=1 $(PYTEST) -m gpu $(ARGS)

test-faults: $(DEV)
	@$(PYTEST) -m "faults_all or not alone" tests/faults $(ARGS)

# Both packages name PyTorch without a version: with their dependencies, pip would replace it. DeepSpeed compiles nothing.
ENGINES_SITE ?= .venv-engines
ENGINES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["engines"], sep="\n")
test-engines: $(DEV)
	@[ -d $(ENGINES_SITE)/deepspeed ] || { echo "Installing DeepSpeed and Megatron-Core into $(ENGINES_SITE): 40 MB"; mkdir -p $(ENGINES_SITE); \
	  $(VENV)/bin/python -c '$(ENGINES)' > $(ENGINES_SITE)/requirements.txt; \
	  DS_BUILD_OPS=0 $(PIP) install -q --no-compile --no-deps --target $(ENGINES_SITE) -r $(ENGINES_SITE)/requirements.txt; }
	@PYTHONPATH=$(abspath $(ENGINES_SITE)) $(PYTEST) tests/engines tests/model/test_megatron.py $(ARGS)

soak: $(DEV)
	@$(VENV)/bin/python -m tests.faults.soak --minutes $(or $(MINUTES),60) $(ARGS)

fuzz: $(DEV)
	@$(VENV)/bin/python -m tests.fuzz --minutes $(or $(MINUTES),10) $(ARGS)

check: $(DEV)
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check -q .
	@$(VENV)/bin/python -m mypy
	@$(VENV)/bin/python -m bandit -q -r rather -c pyproject.toml
	@$(VENV)/bin/python .ci/audit
	@$(MKDOCS)

# Processes that tests start are measured, too ([tool.coverage] in pyproject.toml).
coverage: $(DEV)
	@$(VENV)/bin/python -m coverage erase
	@$(VENV)/bin/python -m coverage run -m pytest -q -n $(WORKERS) --no-loadscope-reorder $(ARGS)
	@$(VENV)/bin/python -m coverage combine -q
	@$(VENV)/bin/python -m coverage report

docs: $(DEV)
	@$(MKDOCS)
	@echo "site/index.html; its search needs a server: python3 -m http.server -b 127.0.0.1 -d site"

notebook: $(BASE)
	@$(VENV)/bin/python -m docs.notebook

screenshots: $(DEV)
	@$(VENV)/bin/python -m docs.screenshots

sbom: $(DEV)
	@$(VENV)/bin/python -m cyclonedx_py environment $(VENV) --pyproject pyproject.toml --of JSON -o sbom.json
	@echo "sbom.json: every package of $(VENV) in CycloneDX format"

# It needs git and a Python with setuptools, not PyTorch: any suitable interpreter will do if there is no $(VENV).
release:
	@found=$(VENV)/bin/python; [ -x $$found ] || { $(FIND_PYTHON); }; \
	  "$$found" .ci/release.py $(if $(VERSION),--version $(VERSION)) $(if $(TAG),--tag) $(if $(DRAFT),--draft)

bench: $(DEV)
ifdef NAME
	@$(VENV)/bin/python bench/$(NAME).py $(ARGS)
else
	@echo "Benchmarks (run one with: make bench NAME=<name>):"
	@for file in bench/*.py; do [ -e "$$file" ] || { echo "  none yet"; continue; }; \
	  echo "  $$(basename $$file .py): $$(sed -n '1s/^"""\(.*[^"]\)"*$$/\1/p' $$file)"; done
endif

# Nothing here deletes a virtual environment that this Makefile did not create, nor one behind a link.
define REFUSE_FOREIGN
if [ -L $(VENV) ] || { [ -e $(VENV) ] && [ ! -e $(OWNED) ] && [ ! -e $(BASE) ]; }; then \
  echo "$(VENV) exists and was not created by this Makefile, so it is left as it is. Remove it yourself, or choose another folder: make VENV=.venv-rather" >&2; exit 1; \
fi
endef

clean:
	@[ ! -e $(VENV) ] || { $(REFUSE_FOREIGN); rm -rf $(VENV); }
	rm -rf .pytest_cache .ruff_cache .mypy_cache build dist site *.egg-info .coverage .coverage.*
	find rather tests bench examples -type d -name __pycache__ -prune -exec rm -rf {} +

# An interpreter is suitable if it runs (a pyenv shim may not), is 3.11 or newer and can create a venv with pip.
PROBE := import sys; sys.version_info < (3, 11) and sys.exit(11); from importlib.util import find_spec; \
  all(map(find_spec, ("venv", "ensurepip"))) or sys.exit(12)
define FIND_PYTHON
if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; else set -- python3 python3.14 python3.13 python3.12 python3.11 python; fi; \
found=""; old=""; bare=""; \
for name; do \
  "$$name" -c '$(PROBE)' >/dev/null 2>&1; \
  case $$? in 0) found=$$name; break;; 11) old=$$name;; 12) bare=$$name;; esac; \
done; \
if [ -n "$$found" ]; then :; \
elif [ -n "$$bare" ]; then \
  echo "$$bare has no venv module: install it (Debian, Ubuntu: apt install python3-venv) or set PYTHON= to another Python." >&2; exit 1; \
else \
  echo "No Python 3.11 or newer found$${PYTHON:+ as PYTHON=$$PYTHON}$${old:+ ($$old is older)}: install one, or set PYTHON=/path/to/python3." >&2; exit 1; \
fi
endef

export PYTHON
$(BASE): pyproject.toml constraints.txt
	@[ -z "$(FRESH)" ] && $(PIP) --version >/dev/null 2>&1 || { $(REFUSE_FOREIGN); $(FIND_PYTHON); \
	  echo "Creating $(VENV) with $$("$$found" --version)"; "$$found" -m venv --clear $(VENV) && touch $(OWNED); }
	@echo "Downloading PyTorch ($(if $(TORCH),$(TORCH),$(PINNED_TORCH): 0.15 GB without CUDA; about 3 GB with it, the default on Linux)) and 0.1 GB of other packages."
	@$(if $(TORCH),:,echo "Without a GPU, choose the small build: make install TORCH='$(PINNED_TORCH)+cpu --extra-index-url URL', with the URL of PyTorch's CPU index.")
	@grep -v $(if $(TORCH),'^torch==','^$$') constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install --no-compile -c $(VENV)/constraints.txt $(if $(TORCH),$(TORCH),$(PINNED_TORCH))
	@echo "Installing the other packages"
	@$(PIP) install -q --no-compile -c $(VENV)/constraints.txt -e .
	@$(COMPILE)
	@printf '%s\n' '$(CURDIR)' '$(if $(TORCH),$(TORCH),$(PINNED_TORCH))' > $@

$(DEV): $(BASE)
	@echo "Installing what the tests need: 0.4 GB"
	@$(PIP) install -q --no-compile -c $(VENV)/constraints.txt -e ".[dev]"
	@$(COMPILE)
	@touch $@

# pip compiles on one core, which takes a third of the installation: compile on all cores, and skip the thousands of
# files that are rarely imported.
COMPILE = $(VENV)/bin/python -m compileall -q -q -j 0 -x '/(tests?|testing|models)/' $(VENV)/lib || true
