"""The local sandbox as a Harbor environment: `--env harness_rl.sandboxes.bubblewrap:BubblewrapEnvironment`. Invariant: what the task asks
for is enforced or the task is refused by name; nothing of a trial ever runs on the host.

This file is only Harbor's surface. A session's life is in sandbox.py, its images in images.py, transfers in transfer.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment
from harbor.environments.base import ExecResult as HarborExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import NetworkMode
from harbor.models.trial.config import ResourceMode

from . import transfer
from .errors import RuntimeRequestError, SandboxBuildFailedError
from .hooks import PROXY_PORT, SandboxHooks, claim
from .images import TaskImage, check_definition, prepare
from .launch import DEFAULT_PATH
from .limits import SandboxLimits
from .sandbox import Sandbox, SandboxSpec

_LOCAL_HOSTS = ("127.0.0.1", "localhost")
_VERIFIED_FOLDERS = (transfer.VERIFIER_OUTPUT, "/tests")


@dataclass(frozen=True)
class Verification:
    """What was found when a sandbox was made ready for its verifier."""

    killed: int
    """Processes of the agent's phase that were still running."""
    planted: list[str]
    """Files in the folders that belong to the verifier, removed (at most 100 named)."""
    replaced: list[str]
    """Programs of the image's that the agent replaced, removed or put something in front of (changed.py). They stay as they are: a
    verifier in the agent's sandbox runs with them, and its verdict is worth what `reward.tampered` says."""
    hindered: list[str] = field(default_factory=list)
    """What else of the agent's doing can keep a verifier from its work: a folder that cannot be emptied, a disk quota that is full. A
    verdict counts all the same; where there is none, it is why."""

    @property
    def tampered(self) -> bool:
        return bool(self.planted or self.replaced)


class BubblewrapEnvironment(BaseEnvironment):
    """A namespace sandbox on this machine.

    Keyword arguments (Harbor's `environment.kwargs`): `layers`, folders mounted read-only over the root file system, the topmost first;
    `rootfs`, a root file system to use instead of the built one; `proxy_port`, the one TCP port of 127.0.0.1 that leads out, opened only
    under `sandbox_hooks` (hooks.py); `limits`, a mapping of SandboxLimits fields for what the task leaves open."""

    def __init__(
        self,
        *args: Any,
        layers: Sequence[str | Path] = (),
        rootfs: str | Path | None = None,
        proxy_port: int = PROXY_PORT,
        limits: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._layers = tuple(Path(layer) for layer in layers)
        self._rootfs = Path(rootfs) if rootfs else None
        self._proxy_port = proxy_port
        try:
            self._own_limits = SandboxLimits(**(limits or {}))
        except TypeError as error:
            raise ValueError(f"sandbox limits: {error}; known are {', '.join(vars(SandboxLimits()))}") from error
        self._sandbox: Sandbox | None = None
        self._image = TaskImage(())
        super().__init__(*args, **kwargs)
        # A separate verifier's sandbox is constructed under the same hooks; only the agent's may have a way out.
        self._hooks = SandboxHooks() if "__verifier__" in self.session_id else claim(self)

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True, network_allowlist=True, network_allowlist_hostnames=True, network_allowlist_ipv4_addresses=True
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        check_definition(self.environment_dir, self.task_env_config.docker_image)
        for layer in self._layers:
            if not layer.is_dir():
                raise SandboxBuildFailedError(f"layer {layer} does not exist: build it with `harness-rl agents build NAME`")
        if foreign := [mount["target"] for mount in self._user_mounts()]:
            raise SandboxBuildFailedError(f"mounts are not supported in this sandbox: {', '.join(foreign)}")
        policy = self.network_policy
        if policy.network_mode == NetworkMode.ALLOWLIST and (hosts := [host for host in policy.allowed_hosts if host not in _LOCAL_HOSTS]):
            raise SandboxBuildFailedError(
                f"the task may reach {', '.join(hosts)}, but this sandbox has no network; remove them from allowed_hosts"
            )
        if policy.network_mode == NetworkMode.PUBLIC:
            self.logger.debug("this sandbox has no network although the task would allow one")

    def _user_mounts(self) -> list[Any]:
        """Mounts that the user asked for, as opposed to Harbor's own log folders."""
        return [mount for mount in self._mounts if not str(mount["target"]).startswith("/logs/")]

    def _limits(self) -> SandboxLimits:
        cpus = self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT)
        memory = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        asked = {"cpus": cpus, "memory_mb": memory, "storage_mb": self.task_env_config.storage_mb}
        return replace(self._own_limits, **{name: value for name, value in asked.items() if value})

    async def start(self, force_build: bool) -> None:
        timeout = self.task_env_config.build_timeout_sec
        self._image = await prepare(self.environment_dir, self.task_env_config.docker_image, self._rootfs, timeout, self.logger)
        listener = self._hooks.on_listener
        spec = SandboxSpec(
            lowers=(*self._layers, *self._image.lowers), limits=self._limits(), port=None if listener is None else self._proxy_port
        )
        self._sandbox = await Sandbox.start(spec, on_listener=listener, log=self.logger)
        shared = shlex.join(["/logs", *self._mount_targets(writable_only=True)])
        result = await self._sandbox.exec(["/bin/sh", "-c", f"mkdir -p {shared} {shlex.quote(self._default_cwd)} && chmod 777 {shared}"])
        if result.code != 0:
            raise SandboxBuildFailedError(
                f"cannot prepare the sandbox's folders: {result.stderr.decode('utf-8', 'replace').strip()[-300:]}"
            )
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Kill and reclaim everything; `delete` makes no difference, as nothing of a session can be kept."""
        if self._sandbox is not None:
            await self._sandbox.stop()

    @property
    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeRequestError("the sandbox has not been started")
        return self._sandbox

    @property
    def _default_cwd(self) -> str:
        return self.task_env_config.workdir or self._image.workdir or "/"

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> HarborExecResult:
        result = await self._running.exec(
            ["/bin/bash", "-c", command],
            env={**self._image.env, **(self._merge_env(env) or {})},
            cwd=cwd or self._default_cwd,
            user=self._resolve_user(user),
            timeout_s=timeout_sec,
            on_output=self._output_callback(),
        )
        out, err = (stream.decode("utf-8", "replace") for stream in (result.stdout, result.stderr))
        if result.truncated:
            err += f"\nharness-rl: output stopped at the limit of {self._running.spec.limits.output_mb} MiB\n"
        return HarborExecResult(stdout=out, stderr=err, return_code=result.code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await transfer.upload_file(self._running, Path(source_path), str(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await transfer.upload_dir(self._running, Path(source_dir), str(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await transfer.download_file(self._running, str(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if skipped := await transfer.download_dir(self._running, str(source_dir), Path(target_dir)):
            self.logger.debug("download of %s skipped %d entries: %s", source_dir, len(skipped), "; ".join(skipped[:10]))

    async def before_verification(self, *, keep_services: bool = False) -> Verification:
        """Take the sandbox out of the agent's hands: kill what it left running, empty the verifier's folders. Call it in the AGENT_END
        hook.

        `keep_services` spares the processes, for tasks whose verifier talks to a server that the agent had to start.
        """
        killed = 0 if keep_services else await self._running.kill_commands()
        search = self._image.env.get("PATH", DEFAULT_PATH).split(":")
        report = await self._running.clean(_VERIFIED_FOLDERS, search=search, work=self._default_cwd)
        result = Verification(killed, report["found"], report["replaced"], report["hindered"])
        if result.tampered or result.hindered:
            self.logger.warning(
                "before verification: removed %s; replaced programs: %s; in the way: %s",
                result.planted or "nothing",
                result.replaced or "none",
                result.hindered or "nothing",
            )
        return result
