#!/usr/bin/env bash
# One command on a fresh GPU machine: the GPU's tests, the attention kernels side by side, the latency sweep.
#
#   scripts/gpu_check.sh [FOLDER]      default: results/gpu
#
# Writes FOLDER/gpu_check.json and FOLDER/gpu_check.md, anew after each part: what was measured is there even if the
# machine goes away, and the same command goes on with what is missing. Settings, all optional:
#   PYTHON=...      the interpreter that has kvbench's packages (.venv/bin/python if it is there, else python3)
#   EXPERIMENT=...  the sweep (latency; latency_cpu rehearses everything on a machine without a GPU)
#   SECONDS_MAX=... end by then
set -u
cd "$(dirname "$0")/.."
out=${1:-results/gpu}
experiment=${EXPERIMENT:-latency}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # kvbench itself need not be installed
until_then=${SECONDS_MAX:-86400}
case $until_then in
    '' | *[!0-9]*) echo "SECONDS_MAX=$until_then: expected a number of seconds, such as 540" >&2 && exit 2 ;;
esac
if [ ! -f "conf/experiment/$experiment.yaml" ]; then
    echo "EXPERIMENT=$experiment: no such experiment; latency, or latency_cpu without a GPU" >&2
    exit 2
fi
if ! "$PYTHON" -c 'import torch, transformers, hydra' 2>/dev/null; then
    echo "PYTHON=$PYTHON: it has not all of torch, transformers and hydra-core; 'make setup' makes .venv, which has" >&2
    exit 2
fi
if [ "$experiment" != latency_cpu ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no CUDA device here; EXPERIMENT=latency_cpu $0 rehearses without one" >&2
    exit 2
fi
mkdir -p "$out"

# Runs a part for at most the given seconds, and never past the end; what it prints goes to a log.
part() {
    name=$1 most=$2 && shift 2
    left=$((until_then - SECONDS))
    [ "$left" -lt "$most" ] && most=$left
    [ "$most" -lt 10 ] && echo "$name: no time left" && return
    echo "$name ..."
    timeout -k 10 "$most" "$@" >"$out/$name.log" 2>&1 || echo "$name: exit code $?, see $out/$name.log"
    "$PYTHON" scripts/gpu_check.py "$out"
}

# torch's own count of waits and the GPU's tests; those over twins ran with the others. FlashInfer compiles for minutes.
workers=$("$PYTHON" -c 'import xdist' 2>/dev/null && echo "-n 4")
part tests 300 "$PYTHON" -m pytest $workers -m gpu -p no:cacheprovider --junitxml="$out/tests.xml" tests/gpu
part kernels 180 "$PYTHON" scripts/bench_attention.py
part latency 86400 "$PYTHON" -m kvbench "+experiment=$experiment" "results_dir=$out"
echo "$out/gpu_check.md"
