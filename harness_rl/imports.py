"""A user's own object by name: `package.module:name` or `path/file.py:name`. One line when it cannot be had."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from harness_rl.errors import UserError


def load_object(path: str, setting: str) -> Any:
    """The callable that `path` names; `setting` is the config key for the error. Raises UserError."""
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise UserError(f"{setting} = {path!r}: write module:name or file.py:name")
    try:
        if where.endswith(".py"):
            loader = importlib.util.spec_from_file_location(f"harness_rl_user_{Path(where).stem}", where)
            if loader is None or loader.loader is None or not Path(where).is_file():
                raise UserError(f"{setting}: {where} does not exist")
            module = importlib.util.module_from_spec(loader)
            sys.modules[loader.name] = module  # a dataclass looks its own module up
            loader.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - importing runs the user's code, which may raise anything
        raise UserError(f"{setting}: {where} cannot be imported: {type(error).__name__}: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"{setting}: {where} has no function or class {name}")
    return found


def load_script(path: str) -> None:
    """Let the file that `path` names import what lies beside it, as a script can."""
    where = path.rpartition(":")[0]
    folder = str(Path(where).parent)
    if where.endswith(".py") and folder not in sys.path:
        sys.path.insert(0, folder)
