#!/usr/bin/env bash
# One command on a fresh GPU machine, of at most nine minutes: what is promised of decode steps beside what they take,
# captured steps beside others, tests and kernels; a short table last. The same command goes on with what is missing.
#
#   scripts/gpu_check.sh [FOLDER] [--seconds 520]     default: results/gpu; writes FOLDER/gpu_check.json
#   scripts/gpu_check.sh FOLDER --rehearse            a small model on the tests' stand-in for a GPU, anywhere
#
# PYTHON=... is the interpreter that has kvbench's packages (.venv/bin/python if it is there, else python3).
set -u
case ${1:-} in '' | -*) set -- results/gpu "$@" ;; esac
case $1 in /*) ;; *) set -- "$PWD/$1" "${@:2}" ;; esac
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # kvbench itself need not be installed
if ! "$PYTHON" -c 'import torch, transformers, hydra, pytest' 2>/dev/null; then
    echo "PYTHON=$PYTHON: it has not all of torch, transformers, hydra-core and pytest; 'make setup' makes .venv, which has" >&2
    exit 2
fi
if [[ " $* " != *" --rehearse "* ]] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no CUDA device here; $0 $1 --rehearse needs none" >&2
    exit 2
fi
exec "$PYTHON" scripts/gpu_check.py "$@"
