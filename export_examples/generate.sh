#!/usr/bin/env bash
# Sets up .venv where needed and generates text: only the text goes to stdout.
# Arguments go to generate.py: `bash export_examples/generate.sh --prompt "The capital of France is"`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tests/environment.sh"
environment examples
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$VENV/bin/python" -m export_examples.generate "$@"
