# The same commands CI runs. Both README commands set up .venv at first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve test check format size benchmarks experiments experiments-quick clean

serve: $(READY)
	$(BIN)/stepserve serve $(ARGS)

test: $(READY)
	$(BIN)/pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/size_report.py

format: $(READY)
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

experiments: $(READY)
	start=$$(date +%s); \
	for name in $(FULL); do \
		$(BIN)/stepserve simulate experiments/$$name.toml --jobs 2 --out out/full/$$name && \
		cp out/full/$$name/results.json experiments/$$name.json || exit 1; \
		echo "$$name: $$(( ($$(date +%s) - start) / 60 )) minutes since the start"; done
	cp out/full/ar-parts/overhead/timing.json experiments/ar-parts/overhead.timing.json
	$(BIN)/python experiments/plot.py
	$(BIN)/python experiments/tables.py --write

$(READY): pyproject.toml
	@echo "setting up $(VENV): torch, then stepserve; some minutes, 1.5 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
