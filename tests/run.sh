#!/usr/bin/env bash
# Sets up .venv where needed and runs the tests that need neither long builds nor a GPU.
# Arguments go to pytest: `bash tests/run.sh tests/test_cases.py -k gqa_dense`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
environment test
run_pytest -m "not package and not cpp and not model and not gpu" "$@"
