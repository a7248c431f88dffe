# Two commands for a newcomer: `make compare` and `make test`. Both first make a virtual environment with the pinned
# dependencies, whose hashes pip checks. PYTHON chooses the interpreter (3.11 to 3.13), VENV where it is made.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
RESULTS = results

.PHONY: compare test test-slow bench processes docs docs-check lint requirements clean

compare: $(VENV)/ready
	$(RUN) -m bench compare $(ARGS)

# In two processes, since most of it is compilation, each in one thread. (Those of `test-slow` have processes of their own.)
test: $(VENV)/ready
	$(RUN) -m pytest -m "not slow" --numprocesses 2 $(ARGS)

# Runs in several processes, killed and stopped ones, and a Slurm if one is installed.
test-slow: $(VENV)/ready
	$(RUN) -m pytest -m slow $(ARGS)

# Times the default step of both twins on every number of devices, and keeps the figures.
bench: $(VENV)/ready
	mkdir -p $(RESULTS)
	$(RUN) -m pytest bench --benchmark-json=$(RESULTS)/bench.json $(ARGS)

# Times the step between two processes of this machine, with and without buckets and communication.
processes: $(VENV)/ready
	$(RUN) -m bench processes $(ARGS)

# Writes every printed output and quoted source of README.md and docs/ into the pages; takes a quarter of an hour.
docs: $(VENV)/ready
	$(RUN) -m bench docs $(ARGS)

# Checks those that are the same in every run and done in half a minute. (`make docs ARGS=--check` checks all.)
docs-check: $(VENV)/ready
	$(RUN) -m bench docs --check --commands quick $(ARGS)

lint: $(VENV)/ready
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/ty check --python $(VENV)

$(VENV)/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11, 3.12 or 3.13 is needed: make $(MAKECMDGOALS) PYTHON=python3.13"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --requirement requirements.txt
	touch $@

# Pins every dependency for all supported Pythons, with hashes; needs uv.
requirements:
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make requirements" --group dev --output-file requirements.txt pyproject.toml

clean:
	rm -rf .venv* results* .benchmarks .jax_cache .pytest_cache .ruff_cache .hypothesis
