# The same commands CI runs. `make serve` sets up .venv at first use, with what serving needs;
# `make test` and `make check` add what development needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: serve test check format size benchmarks experiments experiments-quick clean

serve: $(READY)
	$(BIN)/stepserve serve $(ARGS)

test: $(DEV)
	$(BIN)/pytest $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/size_report.py

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(READY)
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/gateway.py

# Short versions of some experiments, tables on the screen: minutes, on two cores.
QUICK := headline/headline load-sweeps/llada-gsm8k ablations/ablations bundled/bundled \
	two-hours/two-hours hybrid/hybrid ar-fixed/ar-fixed ar-parts/budget

experiments-quick: $(READY)
	for name in $(QUICK); do $(BIN)/stepserve simulate experiments/$$name.toml \
		--quick --jobs 2 --out out/quick/$$name && \
		cp out/quick/$$name/results.json out/quick/$$name.json || exit 1; done
	$(BIN)/python experiments/tables.py --results out/quick

# All of them in full, into the committed results, figures and tables: hours. It says how long.
FULL := $(filter-out smoke/%,$(patsubst experiments/%.toml,%,$(wildcard experiments/*/*.toml)))

experiments: $(DEV)
	start=$$(date +%s); \
	for name in $(FULL); do \
		$(BIN)/stepserve simulate experiments/$$name.toml --jobs 2 --out out/full/$$name && \
		cp out/full/$$name/results.json experiments/$$name.json || exit 1; \
		echo "$$name: $$(( ($$(date +%s) - start) / 60 )) minutes since the start"; done
	cp out/full/ar-parts/overhead/timing.json experiments/ar-parts/overhead.timing.json
	$(BIN)/python experiments/plot.py
	$(BIN)/python experiments/tables.py --write

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) to serve: some minutes, 280 MB to download and 1.2 GB on disk if pip finds"
	@echo "torch for CPUs; torch with CUDA, which the public index has for Linux, is 6 GB (docs/operations.md)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[engine]'
	touch $@

$(DEV): $(READY)
	@echo "adding what tests and checks need: 140 MB to download, 500 MB on disk"
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
