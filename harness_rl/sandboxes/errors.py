"""What can go wrong with a sandbox, under the class names by which Harbor sorts failures. Invariant: no failure of ours is scored.

Harbor decides by the *name* of an exception's class whether a trial is retried and graded and whether its reward counts; a name that it
does not know counts as a valid reward. So each error here carries a name of Harbor's list of infrastructure failures (retry, do not
grade, no reward):

    harness_rl.errors.SandboxError
    └── LocalSandboxError                     never raised itself
        ├── SandboxBuildFailedError           the image, task layer or boot failed, or the host refuses
        ├── RuntimeRequestError               the sandbox died or stopped answering under a request
        └── SandboxLikelyOutOfMemoryError     it died after the kernel killed for memory
"""

from __future__ import annotations

from harness_rl.errors import SandboxError


class LocalSandboxError(SandboxError, RuntimeError):
    """A RuntimeError too, because Harbor's agents re-raise only those unchanged from their setup."""


class SandboxBuildFailedError(LocalSandboxError):
    """There is no sandbox; the message says why and what to change."""


class RuntimeRequestError(LocalSandboxError):
    """A request to a sandbox failed for reasons of ours or the host's, not the command's."""


class SandboxLikelyOutOfMemoryError(LocalSandboxError):
    """The sandbox's first process is gone after the kernel had killed for memory in it."""
