PYTHON ?= python3
DEMO_TEXT ?= The river froze early that winter, and the ferry was pulled ashore before the first snow.

# Python packages come from the package index that pip is configured to use.
.venv/ready: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints-dev.txt torch
	.venv/bin/python -m pip install --quiet -c constraints-dev.txt -e '.[dev]'
	touch $@

# The second environment: transformer-lens 3.9, whose models are HookedTransformers.
.venv-tl3/ready: pyproject.toml constraints-tl3.txt
	$(PYTHON) -m venv .venv-tl3
	.venv-tl3/bin/python -m pip install --quiet -c constraints-tl3.txt torch
	.venv-tl3/bin/python -m pip install --quiet -c constraints-tl3.txt -e '.[dev]'
	touch $@

.PHONY: demo test test-tl3 check notebooks screenshots bench tables docs clean

demo: .venv/ready
	.venv/bin/cw-lens explain --text "$(DEMO_TEXT)" --out runs/demo
	.venv/bin/cw-lens faithfulness --examples 8 --max-tokens 96 --fractions 0.1 0.3 0.7 \
		--metrics attention value_weighted contribution --out runs/demo-faithfulness

test: check
	scripts/install-chromium.sh
	.venv/bin/python -m pytest -n 2 --durations=25

test-tl3: .venv-tl3/ready
	.venv-tl3/bin/python -m pytest -n 2 --durations=25 -m "not browser and not apart"

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/lint-imports

# Runs every notebook top to bottom and writes it back, its outputs as a code host can show them.
notebooks: .venv/ready
	scripts/install-chromium.sh
	.venv/bin/python scripts/execute_notebooks.py

# Pictures of every view, figure and report page, to be looked at: screenshots/index.html.
screenshots: .venv/ready
	scripts/install-chromium.sh
	.venv/bin/python scripts/screenshots.py

bench: .venv/ready
	.venv/bin/python benchmarks/capture.py
	.venv/bin/python benchmarks/faithfulness.py
	.venv/bin/python benchmarks/studies.py
	.venv/bin/python benchmarks/views.py

# The generated pages of docs/.
tables: .venv/ready .venv-tl3/ready
	.venv/bin/python -m tests.what_works
	.venv-tl3/bin/python -m tests.what_works
	.venv/bin/python benchmarks/precision.py

# The documentation site: docs/_build/html/index.html, which opens from the disk.
docs: .venv/ready
	.venv/bin/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf .venv .venv-tl3 runs screenshots docs/_build docs/notebooks .pytest_cache .ruff_cache .hypothesis *.egg-info
