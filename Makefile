# The few commands one needs. `make check` is what a commit must pass; `.ci/run` is the whole.
.PHONY: install format check test harnesses

install:            ## environment with every extra
	uv sync --all-extras

format:             ## rewrite to the project's style
	uv run --extra dev ruff check --fix .
	uv run --extra dev ruff format .

check:              ## lint, format, types
	uv run --extra dev ruff check .
	uv run --extra dev ruff format --check .
	uv run --extra dev mypy

test:               ## the README's test command
	uv run --extra dev pytest -n 3

harnesses:          ## the real coding agents that `pytest -m harness` drives; prints what to `eval`
	@.ci/install-harnesses .ci/state/harnesses
