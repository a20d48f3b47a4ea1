# `make demo` and `make test` need only Python 3.11+, make and a package index: the .venv is made when there is none.
#
#   PYTHON=python3.12                           the interpreter of a new .venv; otherwise the first that serves
#   TORCH="torch==2.13.0+cpu --extra-index-url <PyTorch's CPU index>"
#                                               another PyTorch: a requirement, a wheel file, pip options
#   ARGS="-k losses"                            further arguments of test, demo and bench
#   WORKERS=4                                   tests at a time
#   MINUTES=10                                  of make soak
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) are respected.

VENV  := .venv
STAMP := $(VENV)/.installed
PIP   := $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST  := $(VENV)/bin/python -m pytest -q
MKDOCS  := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
WORKERS ?= 2
MINUTES ?= 60

# A .venv knows its own absolute path and the PyTorch asked for: a moved folder or another TORCH= makes it anew.
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)
MADE_HERE    := $(shell sed -n 1p $(STAMP) 2>/dev/null)
MADE_TORCH   := $(shell sed -n 2p $(STAMP) 2>/dev/null)
ifneq ($(MADE_HERE),$(CURDIR))
FRESH := yes
endif
ifdef TORCH
ifneq ($(TORCH),$(MADE_TORCH))
FRESH := yes
endif
endif
ifdef FRESH
.PHONY: $(STAMP)
endif

.PHONY: help install demo test test-all test-gpu test-faults soak check docs screenshots sbom bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train a tiny model on this machine and watch its answers change"
	@echo "make test     run the test suite"
	@echo "make test-all     and the further cells of its matrices that tests/wide.py lists"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make test-faults  kill a run at every place in every layout; most of an hour"
	@echo "make soak     break runs at random for an hour; MINUTES=10 for less"
	@echo "make check    ruff, mypy --strict and bandit on the package, pip-audit on what is installed, the docs with their links"
	@echo "make docs     the documentation as a site: site/index.html"
	@echo "make screenshots  the pictures of the docs, taken anew by the tests that drive a browser"
	@echo "make sbom     sbom.json: a list of all installed packages (CycloneDX)"
	@echo "make bench    list the benchmarks; make bench NAME=<one of them> runs it"
	@echo "make install  make $(VENV) with the command 'rather' (the others do it by themselves)"
	@echo "make clean    remove $(VENV) and the caches of the tools"

install: $(STAMP)
	@echo "Ready: $(VENV)/bin/rather --help"

demo: $(STAMP)
	@$(VENV)/bin/rather demo $(ARGS)

# Two at a time: most tests of processes wait for each other. Status 5: no test was chosen, by ARGS, of this half.
test: $(STAMP)
	@$(PYTEST) -n $(WORKERS) --no-loadscope-reorder -m "not alone" $(ARGS); first=$$?; $(PYTEST) -m alone $(ARGS); second=$$?; \
	  case "$$first $$second" in "0 0"|"0 5"|"5 0") ;; *) exit 1 ;; esac

test-all:
	@$(MAKE) --no-print-directory test ARGS="--all $(ARGS)"

test-gpu: $(STAMP)
	@RATHER_TEST_GPU=1 $(PYTEST) -m gpu $(ARGS)

test-faults: $(STAMP)
	@$(PYTEST) -m "faults_all or not alone" tests/faults $(ARGS)

soak: $(STAMP)
	@$(VENV)/bin/python -m tests.faults.soak --minutes $(MINUTES) $(ARGS)

check: $(STAMP)
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m mypy
	@$(VENV)/bin/python -m bandit -q -r rather -c pyproject.toml
	@$(VENV)/bin/python .ci/audit
	@$(MKDOCS)

docs: $(STAMP)
	@$(MKDOCS)
	@echo "site/index.html; its search needs a server: python3 -m http.server -b 127.0.0.1 -d site"

screenshots: $(STAMP)
	@RATHER_SCREENSHOTS=1 $(PYTEST) tests/report tests/board/test_page.py

sbom: $(STAMP)
	@$(VENV)/bin/python -m cyclonedx_py environment $(VENV) --pyproject pyproject.toml --of JSON -o sbom.json
	@echo "sbom.json: every package of $(VENV) in CycloneDX's form"

bench: $(STAMP)
ifdef NAME
	@$(VENV)/bin/python bench/$(NAME).py $(ARGS)
else
	@echo "Benchmarks (run one with: make bench NAME=<name>):"
	@for file in bench/*.py; do [ -e "$$file" ] || { echo "  none yet"; continue; }; \
	  echo "  $$(basename $$file .py): $$(sed -n '1s/^"""\(.*[^"]\)"*$$/\1/p' $$file)"; done
endif

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build site *.egg-info
	find rather tests bench examples -type d -name __pycache__ -prune -exec rm -rf {} +

# An interpreter serves when it really runs (a pyenv shim may not), is 3.11 or newer and can make a venv with pip.
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
  echo "$$bare has no venv module: install it (Debian, Ubuntu: apt install python3-venv) or name another Python with PYTHON=." >&2; exit 1; \
else \
  echo "No Python 3.11 or newer found$${PYTHON:+ as PYTHON=$$PYTHON}$${old:+ ($$old is older)}: install one, or name it with PYTHON=/path/to/python3." >&2; exit 1; \
fi
endef

export PYTHON
$(STAMP): pyproject.toml constraints.txt
	@[ -z "$(FRESH)" ] && $(PIP) --version >/dev/null 2>&1 || { $(FIND_PYTHON); \
	  echo "Making $(VENV) with $$("$$found" --version)"; "$$found" -m venv --clear $(VENV); }
	@echo "Downloading PyTorch ($(if $(TORCH),$(TORCH),$(PINNED_TORCH): 0.15 GB without CUDA; about 3 GB with it, the default on Linux)) and 0.3 GB of other packages; 2 GB on disk without CUDA."
	@$(if $(TORCH),:,echo "A machine without a GPU can take the small build: make install TORCH='$(PINNED_TORCH)+cpu --extra-index-url URL', with the URL of PyTorch's CPU index.")
	@grep -v $(if $(TORCH),'^torch==','^$$') constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install --no-compile -c $(VENV)/constraints.txt $(if $(TORCH),$(TORCH),$(PINNED_TORCH))
	@echo "Installing the other packages (a minute or two)"
	@$(PIP) install -q --no-compile -c $(VENV)/constraints.txt -e ".[dev]"
	@# pip compiles on one core, a third of the whole time: here on all, and not the thousands of files few ever import.
	@$(VENV)/bin/python -m compileall -q -q -j 0 -x '/(tests?|testing|models)/' $(VENV)/lib || true
	@printf '%s\n' '$(CURDIR)' '$(if $(TORCH),$(TORCH),$(PINNED_TORCH))' > $@
