"""Sync of a LoRA policy by name: the engines keep the base model, and each version of the policy is an adapter of its own beside it.

    write the adapter's folder -> load it as `model@version` -> probe under that name -> control has the proxy ask for it -> retire others

An adapter never changes once it has its name, so a call ends under the one that it began with: nothing is paused, drained or dropped from a
cache (vLLM's cached blocks know their adapter), and what is asked for is proven before it is asked for.

Retired is what no request can ask for any more, by the proxy's own count: it is unloaded, and its folder deleted at the next sync: a server
reads it again for a call that it had put aside, and one whose client has just left may end a moment later.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness_rl.sync.base import SyncReport, timed
from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.everywhere import everywhere
from harness_rl.sync.verify import LogprobProbe, Score, prove


def adapter_name(model: str, version: str) -> str:
    """What the engines call that version of `model`."""
    return f"{model}@{version}"


class AdapterSync:
    """Gives every engine the learner's adapter and proves it. Holds nothing of a server: one that was started again is given it anew."""

    def __init__(
        self, engines: Sequence[EngineClient], root: Path, write: Callable[[Path], None], probe: LogprobProbe, score: Score
    ) -> None:
        """`root` gets a folder for each adapter; `write` makes one, in peft's format, of the weights as they are. Engines must see it."""
        self._engines, self._root, self._write, self._probe, self._score = engines, root.absolute(), write, probe, score
        self._present = ""
        """The newest that is proven."""

    def sync(self, version: str, prompts: list[NDArray[np.int32]]) -> SyncReport:
        """Raises SyncFailed or WeightProofFailed; then nobody is to ask for this version, and calls under earlier ones go on."""
        name, clock = adapter_name(self._engines[0].model, version), dict[str, float]()
        everywhere("health", self._engines, lambda engine: engine.wait_healthy())
        with timed(clock, "write"):
            folder = self._written(name)
        with timed(clock, "load"):
            everywhere("load", self._engines, lambda engine: _load(engine, name, folder))
        with timed(clock, "probe"):
            proof = prove(self._engines, self._probe, self._score, version, prompts, name)
        self._present = name
        return SyncReport(version, proof, clock, adapter=name)

    def _written(self, name: str) -> Path:
        """The adapter's folder, which is whole or not there: a version is written once."""
        folder, temporary = self._root / name, self._root / f".{name}.tmp"
        if folder.is_dir():
            return folder
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            self._write(temporary)
            temporary.rename(folder)
        except OSError as error:
            raise SyncFailed(f"sync step 'write': {folder} could not be written: {error}") from error
        return folder

    def retire(self, asked: Sequence[str]) -> None:
        """`asked`: what can still be asked for. All others of this run go, whichever learner left them. Raises SyncFailed."""
        keep = {*asked, self._present}
        found = everywhere("adapters", self._engines, lambda engine: _of(engine, self._root))
        loaded = dict(zip(self._engines, found, strict=True))
        for folder in self._root.iterdir():
            if folder.name not in keep.union(*found):
                shutil.rmtree(folder, ignore_errors=True)
        everywhere("unload", self._engines, lambda engine: _unload(engine, loaded[engine] - keep))

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def _load(engine: EngineClient, name: str, folder: Path) -> None:
    if name not in engine.adapters():
        engine.load_adapter(name, folder)
    if (found := engine.adapters().get(name)) != folder:
        raise SyncFailed(f"engine {engine.url} has {found or 'nothing'} as adapter {name}, and not {folder}")


def _of(engine: EngineClient, root: Path) -> set[str]:
    return {name for name, folder in engine.adapters().items() if folder.parent == root}


def _unload(engine: EngineClient, names: set[str]) -> None:
    for name in names:
        engine.unload_adapter(name)
