# make env    make .venv (PYTHON=... chooses the Python, TORCH_PIP_ARGS=... where torch comes from)
# make demo   profile this machine, solve plans, run them, print the table
# make test   lint, type check and tests; the same as continuous integration
PYTHON ?=
TORCH_PIP_ARGS ?=

.PHONY: env demo test check lint clean

env:
	@PYTHON='$(PYTHON)' TORCH_PIP_ARGS='$(TORCH_PIP_ARGS)' sh tools/env.sh

demo: env
	.venv/bin/python -m hotspa.demo

lint: env
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m mypy --strict

# Two processes, a test file in one of them; each computes on one thread, or their threads would wait for each other.
test: lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile

check: test

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
