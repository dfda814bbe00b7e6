#!/usr/bin/env bash
# Checks and tests. Arguments go to pytest:
#
#   ./scripts/test.sh                        ruff, mypy, and every test but the slow ones
#   TEST_PROCESSES=1 ./scripts/test.sh       one test after the other, not two files side by side
#   ./scripts/test.sh -m equality            only the tests that carry a marker (see pyproject.toml)
#   ./scripts/test.sh tests/planning -k karp
#   PYTHON=python3.12 ./scripts/test.sh      another interpreter, in .venv-3.12
#   ./scripts/test.sh --no-install           in the current interpreter, without installing
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

take_no_install "$@"
use_environment megatron,dev

if [ ${#arguments[@]} -eq 0 ]; then
    say "ruff"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    say "mypy"
    "$python" -m mypy
    # Files side by side: while the ranks of one test wait for each other, another has the cores.
    arguments=(-m "not slow" --numprocesses "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder)
fi
say "pytest"
exec "$python" -m pytest "${arguments[@]}" </dev/null
