# `make demo` and `make test` do all the set-up themselves in a fresh clone, the demo no more than it needs; both are
# quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed

# Tests start hundreds of processes, and none should compile the library or the tests again.
test test-long check: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-torch lint check browser bench docs wheel test-wheel install-wheel check-tag clean

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(DEMO): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing paceline into $(VENV) (torch is large: the CPU build takes about half a minute, the CUDA build minutes) ..."
	@$(PIP) torch numpy
	@$(PIP) -e '.[demo]'
	@touch $(DEMO)

$(STAMP): $(DEMO)
	@echo "Installing the tools of the tests, Ray, Lightning and Transformers among them, into $(VENV) ..."
	@$(PIP) -e '.[dev,ray,lightning,transformers]'
	@touch $(STAMP)

demo: $(DEMO)
	@$(BIN)/paceline demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An sdist and, from it, a wheel, in dist/.
wheel: $(STAMP)
	@rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

# The wheel in an environment of its own, without constraints and outside the checkout: the demo and the README's script.
test-wheel: wheel
	$(BIN)/python -m pytest tests/test_wheel.py -m "long or not long"

# The wheel as a user installs it: with its dependencies from the index, and the demo outside of the checkout.
install-wheel: wheel
	@rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[demo,view]"
	@out=$$(mktemp -d) && cd $$out && $(CURDIR)/.venv-wheel/bin/paceline demo --epochs 2; code=$$?; rm -rf $$out; exit $$code

# A tag is the version's, and the changelog has it.
TAG ?= v$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/paceline/__init__.py)
check-tag:
	@grep -qx '__version__ = "$(TAG:v%=%)"' src/paceline/__init__.py || { echo "$(TAG) is not the version of src/paceline/__init__.py"; exit 1; }
	@grep -qx '## $(TAG:v%=%)' CHANGELOG.md || { echo "CHANGELOG.md has no section $(TAG:v%=%)"; exit 1; }

# The suite against another torch, in an environment of its own: make test-torch TORCH=2.9.0 ARGS="tests/pace -n 2".
# EXTRA_INDEX: an index of CPU builds, where one can be reached; the usual one has CUDA builds of several gigabytes.
TORCH ?= $(error say which torch: make test-torch TORCH=2.9.0)
test-torch:
	$(PYTHON) harness/other_torch.py $(TORCH) $(if $(EXTRA_INDEX),--extra-index-url $(EXTRA_INDEX)) -- $(ARGS)

check: lint
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -m "not fleet and not browser and not slow and not long" -n 2

# The pages are tested in a real browser: Debian's, installed here when this runs as root and it is missing.
browser:
	@command -v chromedriver >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  echo "Installing chromium for the tests of the pages ..." && \
	  { apt-get install -y -qq chromium chromium-driver >/dev/null 2>&1 || \
	    { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } >/dev/null 2>&1; }; } || \
	  echo "No chromium and chromedriver here: the tests in a browser are SKIPPED."

# Many of these tests wait for processes more than they compute: three at a time keep two cores busy.
test: lint browser
	$(BIN)/python -m pytest -m "not long" -n 3 --dist worksteal

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long -n 3 --dist worksteal

bench: $(STAMP)
	@for file in benchmarks/[a-z]*.py benchmarks/papers/[a-z]*.py; do quick=; \
	case $$file in *gpu_*|*common.py|*/peers.py) continue;; \
	  benchmarks/papers/*|*dynamic_weighting.py|*kill.py|*/goodput.py) quick=--quick;; esac; \
	echo "== $$file"; $(BIN)/python $$file $$quick || exit 1; done

# The site is made from docs/ and the docstrings; a broken link is an error. Only this installs the extra for it.
docs: $(STAMP)
	@$(PIP) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would hide the warnings from --strict
	@echo "The site is in site/; $(BIN)/mkdocs serve shows it at http://127.0.0.1:8000"

clean:
	rm -rf $(VENV) .venv-torch-* .venv-wheel site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
