#!/usr/bin/env bash
# Succeeds, and prints its requirement, when the CPU build of the locked torch resolves for a Python. Usage: torch_wheel.sh UV VERSION
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wanted="$(grep -E '^torch==' "$here/../requirements/torch.lock")+cpu"
mapfile -t links < <("$here/pip_settings.sh")
"$1" pip compile --quiet --no-header --no-deps --only-binary :all: --python-version "$2" "${links[@]}" - <<<"$wanted" >/dev/null
echo "$wanted"
