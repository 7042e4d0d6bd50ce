#!/usr/bin/env bash
# Prints the interpreter to build an environment with. Usage: find_python.sh any|control|torch [UV]
#   any      can make a virtual environment (for uv itself)
#   control  3.12 or 3.13
#   torch    3.11 to 3.13; first the one for which a CPU wheel of torch resolves (pip's find-links are asked too)
# PYTHON (control) or TORCH_PYTHON (torch) in the environment wins. Looks on PATH, then in pyenv's and uv's folders, and runs each
# candidate before believing it: a pyenv shim on PATH may lead nowhere.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kind=${1:?any, control or torch}
uv=${2:-}

candidates() { # VERSION...
  local version path
  for version in "$@"; do
    for path in "python$version" "/usr/bin/python$version" "/usr/local/bin/python$version" \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python "$HOME/.local/share/uv/python/cpython-$version".*/bin/python; do
      path=$(command -v "$path" 2>/dev/null) || continue
      works "$path" "$version" && "$path" -c 'import sys; print(sys.executable)'
    done
  done
  return 0
}

works() { # PATH VERSION
  [ "$("$1" -c 'import sys, ssl, sqlite3, ctypes; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$2" ]
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

case $kind in
any)
  for path in $(candidates 3.12 3.13 3.11 3.14); do
    if "$path" -c 'import venv, ensurepip' 2>/dev/null; then echo "$path" && exit 0; fi
  done
  echo "setup: no Python >= 3.11 with the venv module; install one (Debian: apt-get install python3-venv) and run make again" >&2
  exit 1
  ;;
control)
  if [ -n "${PYTHON:-}" ]; then echo "$PYTHON" && exit 0; fi
  found=$(candidates 3.12 3.13)
  ;;
torch)
  if [ -n "${TORCH_PYTHON:-}" ]; then echo "$TORCH_PYTHON" && exit 0; fi
  found=$(candidates 3.12 3.13 3.11)
  for path in $found; do
    if "$here/torch_wheel.sh" "$uv" "$(version_of "$path")" >/dev/null 2>&1; then echo "$path" && exit 0; fi
  done
  ;;
*)
  echo "find_python.sh: $kind is not any, control or torch" >&2
  exit 2
  ;;
esac
if [ -n "$found" ]; then
  head -n 1 <<<"$found"
elif [ -n "$uv" ] && "$uv" python install --quiet 3.12 2>/dev/null; then
  "$uv" python find 3.12
else
  echo "setup: no Python 3.12 or 3.13 on PATH, in ~/.pyenv or among uv's; install one, or run make PYTHON=/path TORCH_PYTHON=/path" >&2
  exit 1
fi
