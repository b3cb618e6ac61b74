# `make demo` and `make test` do all the set-up themselves in a fresh clone; both are quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing paceline and its tools into $(VENV) (torch is large: about half a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/paceline demo

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not fleet" -n 2

test: check
	$(BIN)/python -m pytest -m fleet

bench: $(STAMP)
	@for file in benchmarks/[a-z]*.py; do case $$file in *gpu_*|*common.py) continue;; esac; echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
