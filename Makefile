# One way in for people and for CI: make demo, make test.
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed

.PHONY: help setup browser postgresql demo test lint types bench docs format clean
help:
	@echo "make demo    set up and run the benchmark on embedded data"
	@echo "make test    set up and run lint, types, import layering and all tests"
	@echo "make setup   make .venv with an editable install"
	@echo "make bench   measure speed, side by side, into benchmarks/*.json"
	@echo "make docs    build the documentation into site/"
	@echo "make browser install Chromium for the tests of reports, if it is missing and apt-get may"
	@echo "make postgresql install PostgreSQL for the tests of the service, if it is missing and apt-get may"
	@echo "make lint | types | format | clean"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt tools/setup.sh
	sh tools/setup.sh $(VENV) dev
	@touch $@

# For the browser tests of reports. Without it, these tests are skipped (on CI they fail).
browser:
	@command -v chromium >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing Chromium" && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "there is no Chromium, and it cannot be installed from here"

# For the tests of the service. Without it, those on PostgreSQL are skipped (on CI they fail).
postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing PostgreSQL" && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null; } || \
	  echo "there is no PostgreSQL, and it cannot be installed from here"

demo: setup
	$(BIN)/fedthe demo

test: lint types browser postgresql
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

docs: $(DOCS_INSTALLED)
	$(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

$(DOCS_INSTALLED): pyproject.toml constraints.txt tools/setup.sh
	sh tools/setup.sh $(VENV) dev,docs
	@touch $@

clean:
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
