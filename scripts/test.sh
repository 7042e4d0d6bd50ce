#!/usr/bin/env bash
# Runs the tests of every environment, prints pytest's closing lines last, fails if one failed. Usage: test.sh [pytest options]
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p .make
export PYTHONDONTWRITEBYTECODE=1
failed=0
run() { # NAME ENVIRONMENT PYTEST-ARGUMENT ...
  "$2/bin/python" -m pytest "${@:3}" 2>&1 | tee ".make/test-$1.log"
  if [ "${PIPESTATUS[0]}" != 0 ]; then failed=1; fi
}
run control .venv --ignore=tests/learner --ignore=tests/gpu --ignore=tests/proxy/interop --ignore=tests/envservers --ignore=tests/examples "$@"
run torch .venv-torch tests/learner tests/gpu "$@"
run openenv .venv-openenv tests/proxy/interop tests/envservers tests/examples "$@"
for name in control torch openenv; do printf '%s: %s\n' "$name" "$(tail -n 1 ".make/test-$name.log")"; done
exit "$failed"
