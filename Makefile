# Everything from a bare machine with python3 (3.10 to 3.13), make and pip.
#   make demo    installs what the command needs, no framework, and runs the demo
#   make test    installs the frameworks of the tests too, and runs them all
#   make matrix  TensorFlow and Keras in the oldest versions that we declare
#   make check   formatting, lint, types, import contracts, words
#   make bench   benchmarks on this machine
#   make docs    the documentation, in docs/_build/html
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The package is installed in place, built by the pinned hatchling.
SELF := --no-build-isolation --editable

.PHONY: demo test matrix check bench docs clean
.DELETE_ON_ERROR:
# One pip at a time in one environment.
.NOTPARALLEL:

demo: $(VENV)/demo.stamp
	$(BIN)/lossscale demo

test: $(VENV)/test.stamp
	$(BIN)/python tools/run_tests.py

matrix: $(VENV)/created.stamp
	$(BIN)/python tools/run_matrix.py $(VENV)/matrix

check: $(VENV)/check.stamp
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/mypy typing_tests
	$(BIN)/lint-imports
	$(BIN)/python tools/check_words.py

bench: $(VENV)/test.stamp
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/demo_seeds.py
	$(BIN)/python benchmarks/demo_depths.py
	$(BIN)/python benchmarks/tensorflow_step.py
	$(BIN)/python benchmarks/keras_step.py
	$(BIN)/python benchmarks/torch_step.py cpu benchmarks/results
	$(BIN)/python benchmarks/torch_ranks.py benchmarks/results
	$(BIN)/python benchmarks/jax_step.py cpu benchmarks/results
	$(BIN)/python benchmarks/backtest.py
	$(BIN)/python benchmarks/backtest_cost.py

docs: $(VENV)/docs.stamp
	$(BIN)/sphinx-build -W -n --keep-going -q -b html docs docs/_build/html
	$(BIN)/python docs/check_documented.py docs/_build/html

clean:
	rm -rf $(VENV) docs/_build

# A stamp is newer than what it was installed from, or it is installed again.
$(VENV)/created.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip hatchling editables
	touch $@

$(VENV)/demo.stamp: pyproject.toml constraints.txt $(VENV)/created.stamp
	$(PIP) $(SELF) '.[cli,plot]'
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(PIP) --group tests --group frameworks --group packages --group sight --group trackers
	# It asks for the tensorflow with CUDA; tensorflow-cpu is the same module.
	$(PIP) --no-deps tf-keras
	touch $@

# The checks follow torch's types, and the pages import its adapter.
$(VENV)/check.stamp: $(VENV)/test.stamp
	$(PIP) --group lint
	touch $@

$(VENV)/docs.stamp: $(VENV)/test.stamp
	$(PIP) --group docs
	touch $@
