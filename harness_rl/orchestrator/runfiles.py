"""A run's own files on a disk that does not take them.

Invariant: whichever file of the run meets a full, read-only or broken disk first, the run ends with one line that says so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness_rl.errors import HarnessRLError, first_error

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG})
"""What only a disk says; a failed `write` does not tell its file."""


@contextmanager
def own_files(run_dir: Path) -> Iterator[None]:
    """An OSError of a file of the run, or of any disk, becomes a HarnessRLError; every other error passes through."""
    try:
        yield
    except (OSError, BaseExceptionGroup) as error:
        cause = first_error(error)
        if not isinstance(cause, OSError) or not (cause.errno in _DISK or _lies_in(cause.filename, run_dir)):
            raise
        where = cause.filename if cause.filename is not None else run_dir
        raise HarnessRLError(
            f"a file of the run cannot be written: {where}: {cause.strerror}; make room or mend it, then start again "
            "(training goes on with harness-rl train --resume)"
        ) from error


def _lies_in(name: object, run_dir: Path) -> bool:
    return isinstance(name, str | os.PathLike) and Path(name).absolute().is_relative_to(run_dir.absolute())
