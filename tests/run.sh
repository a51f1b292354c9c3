#!/usr/bin/env bash
# Sets up .venv where needed and runs the tests that need neither long builds nor a GPU.
# Arguments go to pytest: `bash tests/run.sh tests/test_cases.py -k gqa_dense`; with
# tests/interpreter among them, to the run under Triton's interpreter, else to the other.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
environment test
fast="not package and not cpp and not model and not gpu and not aot"
if [ $# -gt 0 ]; then
    case " $* " in
        *tests/interpreter*) run_interpreter "$@" ;;
        *) run_pytest -m "$fast" "$@" ;;
    esac
else
    run_pytest -m "$fast"
    run_interpreter
fi
