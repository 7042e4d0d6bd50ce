#!/usr/bin/env bash
# Runs the tests of both environments, prints pytest's closing lines last, fails if either failed. Usage: test.sh [pytest options]
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p .make
export PYTHONDONTWRITEBYTECODE=1
.venv/bin/python -m pytest --ignore=tests/learner --ignore=tests/accept "$@" 2>&1 | tee .make/test-control.log
control=${PIPESTATUS[0]}
.venv-torch/bin/python -m pytest tests/learner "$@" 2>&1 | tee .make/test-torch.log
torch=${PIPESTATUS[0]}
printf 'control: %s\n' "$(tail -n 1 .make/test-control.log)"
printf 'torch: %s\n' "$(tail -n 1 .make/test-torch.log)"
[ "$control" = 0 ] && [ "$torch" = 0 ]
