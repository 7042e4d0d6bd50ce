"""What a build sandbox borrows from the host: its network's name servers and certificates, pip's effective configuration, npm's registry.
Invariant: nothing but files that these name is visible inside, read-only and below /run, so that no trace of them gets into a layer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import SandboxBuildFailedError

_BORROWED = "/run/host"
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "PIP_CERT")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_OTHER_PIP_OPTIONS = ("require-virtualenv", "user", "target", "prefix", "python", "cache-dir", "log")
"""Options about where the host's pip installs to, not where packages come from."""


@dataclass(frozen=True)
class BuildHost:
    env: dict[str, str]
    binds: tuple[tuple[Path, str], ...]


def build_environment() -> BuildHost:
    binds: dict[Path, str] = {}

    def borrow(path: Path) -> str:
        """The place inside of a host file or folder."""
        real = path.resolve()
        return binds.setdefault(real, f"{_BORROWED}{real}")

    env = {name: value for name in _PROXY_VARIABLES if (value := os.environ.get(name))}
    env |= {name: value for name, value in os.environ.items() if name.lower() == "npm_config_registry"}
    bundle = next((Path(path) for path in (os.environ.get("SSL_CERT_FILE", ""), *_CERTIFICATES) if path and Path(path).is_file()), None)
    if bundle is not None:
        env.update(dict.fromkeys(_CERTIFICATE_VARIABLES, borrow(bundle)))
    for option, value in pip_configuration().items():
        env["PIP_" + option.upper().replace("-", "_")] = _localise(value, borrow)
    env["PIP_NO_CACHE_DIR"] = "1"
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    env["PIP_ROOT_USER_ACTION"] = "ignore"
    resolvers = Path("/etc/resolv.conf")
    if resolvers.exists():
        binds[resolvers.resolve()] = "/etc/resolv.conf"
    return BuildHost(env, tuple(binds.items()))


def pip_configuration() -> dict[str, str]:
    """pip's effective options from files and environment (`pip config list`), the more specific source last."""
    result = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SandboxBuildFailedError(f"{sys.executable} has no pip, whose configuration tells where packages come from: install pip there")
    options: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in result.stdout.splitlines():
        if match := re.fullmatch(r"(global|install|:env:)\.([\w-]+)='(.*)'", line.strip()):
            section, name, value = match.groups()
            if name not in _OTHER_PIP_OPTIONS:
                options[section][name] = value.replace("\\n", " ").strip()
    return {**options["global"], **options["install"], **options[":env:"]}


def _localise(value: str, borrow: Callable[[Path], str]) -> str:
    """Replace paths and file URLs of the host in an option's value by their place inside."""
    words = []
    for word in value.split():
        prefix = "file://" if word.startswith("file://") else ""
        path = Path(word[len(prefix) :])
        if not path.is_absolute() or not path.exists():
            words.append(word)
        elif prefix:
            # The pages of an index on disk link to files beside it.
            words.append(f"{prefix}{borrow(path.parent)}/{path.name}")
        else:
            words.append(borrow(path))
    return " ".join(words)
