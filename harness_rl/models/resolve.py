"""From what the user wrote to one folder on disk.

Engine and learner get the same folder, never a name: a name that each of them resolves could mean two revisions.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness_rl.errors import UserError

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*"]


def resolve_model(name: str) -> str:
    """The absolute folder of a model given as a folder, a catalogue name or a hub id (`owner/name[@revision]`).

    A hub id that is not in the hub's cache is downloaded. Raises UserError: no such model, or a folder that lacks a part.
    """
    from harness_rl.models.packaged import CATALOG, is_complete, model_folder

    folder = Path(name).expanduser()
    if folder.is_dir():
        check_model_folder(folder)
        return str(folder.resolve())
    if name in CATALOG:
        folder = model_folder(name)
        if not is_complete(folder):
            raise UserError(f"model.name: {name} is not fetched yet; run `harness-rl models fetch {name}`")
        return str(folder)
    if _HUB_ID.match(name) and not name.startswith("."):
        return _from_hub(name)
    known = ", ".join(CATALOG)
    raise UserError(f"model.name: {name!r} is no folder, no hub id (owner/name) and none of: {known}")


def check_model_folder(folder: Path) -> None:
    """Raises UserError when configuration, weights or tokenizer are missing."""
    if not (folder / "config.json").is_file():
        raise UserError(f"model.name: {folder} has no config.json; give a folder in Hugging Face format")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise UserError(f"model.name: {folder} has no weights ({', '.join(_WEIGHTS)}); save the model there with save_pretrained")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"model.name: {folder} has no tokenizer ({', '.join(_TOKENIZERS)}); save the tokenizer there with save_pretrained")


def _from_hub(name: str) -> str:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise UserError(f"model.name: {name} is a hub id, which needs huggingface_hub; pip install it, or give a local folder") from None

    repo, _, revision = name.partition("@")
    try:
        folder = snapshot_download(repo, revision=revision or None, allow_patterns=HUB_PATTERNS)
    except RevisionNotFoundError:
        raise UserError(f"model.name: {repo} has no revision {revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise UserError(f"model.name: the hub has no {repo} that you may read; check the name, or log in with `hf auth login`") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(f"model.name: {repo} cannot be downloaded ({type(error).__name__}); give a local folder") from None
    check_model_folder(Path(folder))
    return folder
