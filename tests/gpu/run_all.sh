#!/usr/bin/env bash
# Every test on a GPU, in steps that resume: `bash tests/gpu/run_all.sh [REPORT] [STEP ...]`.
#
# The steps are cases graphs own random big packages sanitizer calls; by default all of them. A
# step that ended well leaves REPORT/STEP.done and is not run again; its log is REPORT/STEP.log.
# REPORT/report.md has a table per operator. WORKERS processes run at a time (default 12), CALLS
# and KEYS are the random calls and compile keys of every operator (default 2000 and 40), PYTHON
# names the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

report=$(realpath -m "${1:-gpu_report}")
shift $(($# > 0))
steps=${*:-cases graphs own random calls big packages sanitizer}
python=${PYTHON:-python3}
workers=${WORKERS:-12}
mkdir -p "$report"
export OMP_NUM_THREADS=1

tests() {
    local log=$1
    shift
    $python -m pytest -q -p no:cacheprovider -p no:benchmark -n "$workers" --dist loadgroup --durations 10 \
        --junitxml "$report/$log.xml" "$@"
}

step() {
    case $1 in
        cases) tests cases -m gpu tests/gpu/test_cases.py ;;
        graphs) tests graphs -m gpu tests/gpu/test_graphs.py ;;
        random) tests random -m gpu tests/gpu/test_random_calls.py ;;
        big) tests big -m gpu tests/gpu/test_big.py ;;
        packages) tests packages -m gpu tests/gpu/test_packages.py ;;
        sanitizer) tests sanitizer -m gpu tests/gpu/test_sanitizer.py ;;
        own) # the operators' own tests
            tests own -m gpu tests/gpu --ignore-glob '*/test_cases.py' \
                --ignore-glob '*/test_graphs.py' --ignore-glob '*/test_random_calls.py' \
                --ignore-glob '*/test_big.py' --ignore-glob '*/test_packages.py' \
                --ignore-glob '*/test_sanitizer.py'
            ;;
        calls)
            $python -m tests.gpu.random_calls --calls "${CALLS:-2000}" --keys "${KEYS:-40}" \
                --workers "$workers" --report "$report"
            ;;
        *) echo "no step $1" >&2; return 2 ;;
    esac
}

failed=()
for name in $steps; do
    if [ -e "$report/$name.done" ]; then
        echo "== $name: done before"
        continue
    fi
    printf '== %s (at %d s)\n' "$name" "$SECONDS"
    if step "$name" >"$report/$name.log" 2>&1; then
        touch "$report/$name.done"
    else
        failed+=("$name")
    fi
    tail -n 3 "$report/$name.log"
done
$python -m tests.gpu.report "$report"
printf '== done (%d s), failed: %s\n' "$SECONDS" "${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
