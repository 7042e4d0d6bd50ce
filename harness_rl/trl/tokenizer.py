"""The model's tokenizer, for user's functions that ask for one. Control itself tokenises nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness_rl.errors import UserError


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a model folder. Raises UserError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError("processing_class: transformers is not installed; pip install it, or give processing_class") from None
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise UserError(f"processing_class: {folder} has no tokenizer that transformers reads: {' '.join(str(error).split())}") from None


def check_template(given: Any, folder: Path) -> None:
    """A tokenizer with another chat template than the model's would be shown to nobody: the engine renders. Raises UserError."""
    template = getattr(given, "chat_template", None)
    own = model_template(folder)
    if isinstance(template, str) and own is not None and template.strip() != own.strip():
        raise UserError(
            f"processing_class: its chat template is not the one of {folder}, which the engine renders with; "
            "save the tokenizer beside the model and give that folder as model"
        )


def model_template(folder: Path) -> str | None:
    """The chat template of a model folder, where it has one of its own."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    try:
        template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError):
        return None
    return template if isinstance(template, str) else None
