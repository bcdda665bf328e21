# Every target sets up what it needs from nothing, and is quick when that is already there.
# PROFILE chooses the engines; ARGS is passed on: to `reusebench reproduce`, or to pytest in `make test`.
# A name on the PATH may be a version manager's shim for a version that is not there: each is tried.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
PROFILE ?= laptop
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install models reproduce-all test lint bench lock clean help

help:
	@echo "make reproduce-all   run every experiment on the embedded pair and report (PROFILE=$(PROFILE))"
	@echo "make test            run the tests"
	@echo "make lint            ruff and mypy"
	@echo "make bench           our own overheads beside their targets"
	@echo "make install         only the environment in $(VENV)"
	@echo "make models          only the embedded models"
	@echo "make clean           remove the environment and caches (never runs/)"

install: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python3.11"; exit 4; }
	@test -x $(BIN)/python || { echo "making the environment in $(VENV)"; $(PYTHON) -m venv $(VENV); } \
		|| { echo "venv failed; on Debian or Ubuntu: apt install python3-venv"; rm -rf $(VENV); exit 4; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

models: $(STAMP)
	@$(BIN)/reusebench models pull

reproduce-all: models
	@$(BIN)/reusebench reproduce --profile $(PROFILE) $(ARGS)

test: models
	@$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m reports.overheads

# torch names CUDA's packages as its own on the index. Its CPU builds do without them, and a CUDA build brings
# them by itself when it is installed, so the lock leaves them out.
lock: pyproject.toml
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock
	@grep -vE '^(cuda|nvidia|triton)' requirements.lock > requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
