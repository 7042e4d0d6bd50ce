"""The learner process: pull a batch, take a step, save, sync and prove, answer. It alone drives the engines' weight routes.

The order inside a step is the point: nothing is pushed that was not updated by a finite gradient, and control gets a step's result only
when the engines hold, provably, the weights that the result names. Of several processes rank 0 runs this loop; the others `follow`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness_rl.errors import HarnessRLError, UserError
from harness_rl.learner import checkpoint, lora
from harness_rl.learner.ahead import Ahead
from harness_rl.learner.audit import write_audit
from harness_rl.learner.hub import Pusher
from harness_rl.learner.link import CREDIT, TOKEN_ENV, ControlLink, LinkError, Message
from harness_rl.learner.policy import DTYPES, Policy
from harness_rl.learner.ranks import ALONE, Ranks
from harness_rl.learner.rows import Row, RowState, rows_from_wire
from harness_rl.learner.saving import Saver, load_optimizer, load_state
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Prepared, StepReport, Trainer
from harness_rl.learner.update import Clock
from harness_rl.sync.adapter import AdapterSync
from harness_rl.sync.base import StopPolicy, SyncReport, WeightSender, WeightSync
from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.gloo import GlooSender
from harness_rl.sync.ipc import IpcSender
from harness_rl.sync.nccl import NcclSender
from harness_rl.sync.sparse_nccl import SparseNcclSender
from harness_rl.sync.verify import LogprobProbe

PROBE_TEXT = (
    "You are an agent in a Linux sandbox. Read the task, run one command at a time, look at its output, then go on. "
    "To list files use ls -la; to count the lines of a file use wc -l; to change text use sed or a short Python script. "
    "The quick brown fox jumps over the lazy dog, and 3 + 4 = 7 while 12 * 12 = 144. def main() -> None: print('hello, world')\n"
    '{"command": "grep -rn TODO src | sort | uniq -c | head -20", "reason": "find what is left to do"}\n'
)


class Learner:
    link: ControlLink
    ahead: Ahead

    def __init__(self, spec: LearnerSpec, ranks: Ranks = ALONE) -> None:
        self.spec, self.ranks = spec, ranks
        self.root = Path(spec.run_dir) / "checkpoints"
        if spec.threads:
            torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        newest = ranks.agree(self._find_checkpoint() if ranks.rank == 0 else None)
        self.source = newest.path if newest else Path(spec.model)
        self.policy = Policy.load(spec, self.source, ranks)
        self.trainer = Trainer(self.policy, spec, self._load_reference(), ranks)
        self.saver = Saver(self.root, spec, self.source, ranks, self._saved)
        if ranks.rank:  # the models are made: a user's objective draws on each rank for itself
            torch.manual_seed(spec.seed + ranks.rank)
        self.pusher = Pusher(spec.push_to_hub, self._pushed_to_hub, spec.hub_private) if spec.push_to_hub and ranks.rank == 0 else None
        self.step = 0
        if newest:
            load_optimizer(newest, self.policy, self.trainer.updater.optimizer)
            self.trainer.restore(load_state(newest))
            self.step = newest.step
        self.version = spec.version(self.step)
        """Of the weights as they are; what the engines hold after a sync."""
        self.served_step = -1
        """Optimizer steps in the weights that the engines hold; -1 before the first sync."""
        self.saved_step = self.step if newest else -1
        self.probe = LogprobProbe(
            exact=self.policy.dtype == self.engine_dtype == torch.float32,
            bound=spec.probe_bound,
            first_bound=spec.probe_first_bound,
            tokens=spec.probe_tokens,
        )
        self._pushed: dict[str, torch.Tensor] = {}
        """What a sync sends, while it runs."""
        self.sync = self._build_sync() if spec.engines and ranks.rank == 0 else None

    def _find_checkpoint(self) -> checkpoint.Checkpoint | None:
        checkpoint.clean(self.root)
        found = checkpoint.find(self.root) if self.spec.resume else checkpoint.Found()
        for skipped in found.skipped:
            print(f"learner: skipped checkpoint {skipped}", file=sys.stderr)
        return found.newest

    def _load_reference(self) -> Policy | None:
        """The policy of the KL term; never the newest checkpoint, so that a resumed run keeps its anchor. With LoRA the model without its
        adapter is it, unless another is asked for."""
        source = self.spec.reference_model or self.spec.model
        if not self.spec.kl_beta or (self.spec.lora_rank and source == self.spec.model):
            return None
        frozen = replace(self.spec, gradient_checkpointing=False, offload_activations=False, lora_rank=0)
        reference = Policy.load(frozen, Path(source), self.ranks)
        reference.model.requires_grad_(False)
        return reference

    def follow(self) -> None:
        """Every rank but 0: do what it orders until it says stop. Raises LearnerError when it has gone."""
        updater = self.trainer.updater
        while (order := self.ranks.next_order())[0] != "stop":
            match order:
                case "wait", ():
                    pass
                case "train", (minibatches,):
                    updater.train(minibatches, Clock(self.policy.device))
                case "weights", ():
                    self._weights()
                case "score", (prompts,):
                    self.policy.score_prompts(prompts)
                case "save", (step, version):
                    self.saver.begin(step, version, self.policy, updater.optimizer, updater.state())
        self.saver.wait()

    def run(self, link: ControlLink) -> None:
        """Until control says stop. Raises HarnessRLError."""
        self.link, self.ahead = link, Ahead(link, self._prepare)
        link.on_alive = lambda: self.ranks.order("wait")  # they wait as long as this rank, each with a deadline
        try:
            self._loop()
        finally:
            self.saver.close()
            if self.sync is not None:
                self.sync.close()

    def _loop(self) -> None:
        self.link.hello(self.spec.lineage, self.step, self.spec.link_timeout_s)
        self._push_weights([])
        self.link.send("pull", credit=CREDIT)
        while True:
            began = time.perf_counter()
            message = self.link.wait_for({"batch", "resync", "stop"}, self.spec.batch_timeout_s)
            if message.type == "stop":
                break
            if message.type == "resync":
                self._push_weights([])
                continue
            waited = time.perf_counter() - began
            self.link.send("pull", credit=1)
            self._take_step(message, waited)
        if message.fields.get("save"):
            self._save()
        self.saver.wait()
        if self.pusher is not None and not self.pusher.finish(self.spec.hub_timeout_s):
            print(f"learner: the last upload did not end in {self.spec.hub_timeout_s:.0f} s; its checkpoint is on disk", file=sys.stderr)
        self.ranks.order("stop")
        self.link.send("bye")

    def _take_step(self, batch: Message, waited: float) -> None:
        if batch["step"] != self.step + 1:
            raise LinkError(f"control sent the batch of step {batch['step']}; this learner is at step {self.step}")
        self.saver.check()
        ready = self.ahead.take(batch)
        prepared = ready or self._prepare(batch)
        asleep = self.spec.sync_sleep and self._sync_due(self.step + 1) and self._rest()
        with self.ahead.while_training():
            report = self.trainer.step(prepared, self.version)
        self.step += 1
        if self.spec.audit:
            write_audit(Path(self.spec.run_dir) / "audit" / f"step-{self.step}.npz", report.consumed)
        self._write_worst(report)
        metrics = report.metrics
        metrics["seconds/wait_batch"] = waited
        metrics["seconds/pack" if ready is None else "seconds/pack_ahead"] = prepared.seconds
        unchanged = not report.updated and self.served_step == self.step - 1
        if report.updated:
            self.version = self.spec.version(self.step)
        if asleep or (self._sync_due(self.step) and not unchanged):
            metrics |= self._push_weights(_proven_ids(prepared.rows, report))
        elif unchanged:
            self.served_step = self.step
        self.link.send(
            "result",
            step=self.step,
            version=self.version,
            served=self.served_step,
            rows={row_id: state.value for row_id, state in report.states.items()},
            reasons=report.reasons,
            metrics=metrics,
        )
        if report.updated and self._save_due():
            self._save()  # after the result, so that control has written down every step that a checkpoint covers

    def _prepare(self, batch: Message) -> Prepared:
        return self.trainer.prepare(rows_from_wire(batch["rows"], batch.arrays), batch["rollouts"])

    def _write_worst(self, report: StepReport) -> None:
        """One line a step: the rows on which engine and learner differ most. `version` tells a step from the same one before a restart."""
        line = {"step": self.step, "version": self.version, "rows": report.worst}
        with (Path(self.spec.run_dir) / "worst_rows.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _save_due(self) -> bool:
        """A multiple of `checkpoint_every` is reached, or was passed by a step that had nothing to save."""
        every = self.spec.checkpoint_every
        return bool(every) and self.step // every > max(0, self.saved_step) // every

    def _sync_due(self, step: int) -> bool:
        return step - self.served_step >= self.spec.sync_every

    def _rest(self) -> bool:
        """Have the engines give their memory away until the weights are pushed; agents' calls are held from here on."""
        if not isinstance(self.sync, WeightSync):
            return False
        version = self.spec.version(self.step + 1)
        self.link.send("sync_begin", version=version)
        if self.link.wait_for({"sync_go", "stop"}, self.spec.link_timeout_s).type == "stop":
            return False
        try:
            self.sync.rest()
        except SyncFailed as error:  # an engine that died is started again by control, and wakes up by itself
            self.link.send("sync_failed", version=version, message=str(error))
            return self.link.wait_for({"resync", "stop"}, self.spec.link_timeout_s).type == "resync"
        return True

    def _push_weights(self, rows: Sequence[NDArray[np.int32]]) -> dict[str, float]:
        """Hold, sync, prove, release. Returns the sync's metrics; empty without engines, or when control asks to stop instead.

        A sync that fails is tried again when control says so: an engine that died in it is started again by control.
        """
        if self.sync is None:
            return {}
        began = time.perf_counter()
        self.link.send("sync_begin", version=self.version)
        if self.link.wait_for({"sync_go", "stop"}, self.spec.link_timeout_s).type == "stop":
            return {}
        prompts = self._probe_prompts(rows)
        self.ranks.order("weights")
        self._pushed = self._weights()
        while True:
            try:
                report = self.sync.sync(self.version, prompts)
                self._pushed = {}
                break
            except SyncFailed as error:
                self.link.send("sync_failed", version=self.version, message=str(error))
                if self.link.wait_for({"resync", "stop"}, self.spec.link_timeout_s).type == "stop":
                    return {}
        proof = report.proof
        if proof.alarm:
            print(f"learner: {self.version}: logprob gap {proof.mean_abs:.3g} nears its bound {proof.bound:.3g}", file=sys.stderr)
        self.served_step = self.step
        done = {"proof": _proof_fields(report), "seconds": report.seconds, "counts": report.counts, "adapter": report.adapter}
        self.link.send("sync_done", version=self.version, **done)
        answer = self.link.wait_for({"sync_ack", "stop"}, self.spec.link_timeout_s)
        if answer.type == "sync_ack" and isinstance(self.sync, AdapterSync):
            self._retire(self.sync, answer["adapters_asked"])
        gap = {"probe/mean": proof.mean_abs, "probe/p99": proof.p99_abs, "probe/max": proof.max_abs, "probe/alarm": float(proof.alarm)}
        parts = {f"seconds/sync_{name}": seconds for name, seconds in report.seconds.items()}
        counts = {f"sync/{name}": count for name, count in report.counts.items()}
        return gap | parts | counts | {"seconds/sync": time.perf_counter() - began}

    def _weights(self) -> dict[str, torch.Tensor]:
        """What a sync sends; a collective."""
        return self.policy.adapter() if self.spec.sync_lora == "adapter" else self.policy.weights(self.engine_dtype)

    def _retire(self, sync: AdapterSync, asked: Sequence[str]) -> None:
        """An engine that dies of or before it is given what it needs by control's next order; what is left over goes after a later sync."""
        try:
            sync.retire(asked)
        except SyncFailed as error:
            print(f"learner: adapters that nobody asks for are still loaded: {error}", file=sys.stderr)

    def _probe_prompts(self, rows: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        vocabulary = int(self.policy.model.config.get_text_config().vocab_size)
        prompts = self.probe.choose(rows, seed=self.step)
        return self.probe.filler(prompts, vocabulary, self._probe_text(), seed=self.step)

    def _probe_text(self) -> NDArray[np.int32]:
        """Ids of a fixed text; empty where the model's folder has no tokenizer."""
        if not (self.source / "tokenizer.json").is_file():
            return np.zeros(0, dtype=np.int32)
        from tokenizers import Tokenizer

        return np.array(Tokenizer.from_file(str(self.source / "tokenizer.json")).encode(PROBE_TEXT).ids, dtype=np.int32)

    def _score(self, prompts: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        self.ranks.order("score", prompts)
        return self.policy.score_prompts(prompts)

    def _save(self) -> None:
        """Save the weights as they are, once; control is told when the checkpoint counts."""
        if self.saved_step == self.step:
            return
        self.ranks.order("save", self.step, self.version)
        self.saver.begin(self.step, self.version, self.policy, self.trainer.updater.optimizer, self.trainer.state())
        self.saved_step = self.step

    def _saved(self, saved: checkpoint.Checkpoint, seconds: float) -> None:
        self.link.send("checkpoint", step=saved.step, version=saved.version, path=str(saved.path), seconds=seconds)
        if self.pusher is not None:
            self.pusher.push(saved)

    def _pushed_to_hub(self, saved: checkpoint.Checkpoint, where: str, wrong: str | None) -> None:
        self.link.send("pushed", step=saved.step, where=where, wrong=wrong)

    @property
    def engine_dtype(self) -> torch.dtype:
        return self.policy.dtype if self.spec.engine_dtype == "auto" else DTYPES[self.spec.engine_dtype]

    def _build_sync(self) -> WeightSync | AdapterSync:
        engines = [EngineClient(url, self.spec.served_model, self.spec.sync_timeout_s) for url in self.spec.engines]
        if self.spec.sync_lora == "adapter":
            return AdapterSync(engines, Path(self.spec.run_dir) / "adapters", self._write_adapter, self.probe, self._score)
        policy = StopPolicy(self.spec.sync_mode, self.spec.sync_kv, self.spec.sync_wait_s)
        return WeightSync(engines, self._build_sender(), self.probe, self._score, policy)

    def _write_adapter(self, folder: Path) -> None:
        lora.export(folder, self._pushed, self.spec)

    def _build_sender(self) -> WeightSender:
        backend = self.spec.sync_backend
        if backend == "auto":
            backend = "nccl" if self.policy.device.type == "cuda" else "gloo"
        weights, dtype, timeout_s = lambda: self._pushed.items(), self.engine_dtype, self.spec.sync_timeout_s
        match backend:
            case "nccl":
                return NcclSender(weights, dtype, timeout_s)
            case "sparse_nccl":
                return SparseNcclSender(weights, dtype, timeout_s)
            case "ipc":
                return IpcSender(weights, dtype, timeout_s)
            case _:
                return GlooSender(weights, dtype, timeout_s, self.spec.sync_host)


def _proven_ids(rows: Sequence[Row], report: StepReport) -> list[NDArray[np.int32]]:
    return [row.ids for row in rows if report.states[row.row_id] is not RowState.REJECTED]


def _proof_fields(report: SyncReport) -> dict[str, Any]:
    proof = report.proof
    return {
        "tokens": proof.tokens,
        "mean_abs": proof.mean_abs,
        "p99_abs": proof.p99_abs,
        "max_abs": proof.max_abs,
        "bound": proof.bound,
        "ok": proof.ok,
    }


def main(config: Path, socket_path: Path) -> int:
    """0: stopped as asked; 1: failed; 2: the input is wrong. Standard error says why, and control is told once the link is up."""
    token = os.environ.pop(TOKEN_ENV, None)
    link: ControlLink | None = None
    ranks = ALONE
    try:
        if token is None:
            raise UserError(f"learner: the environment has no {TOKEN_ENV}; control sets it when it starts this process")
        spec = LearnerSpec.read(config)
        ranks = Ranks.join(spec)
        learner = Learner(spec, ranks)
        if ranks.rank == 0:
            link = ControlLink(socket_path, token)
            learner.run(link)
        else:
            learner.follow()
        ranks.leave()
    except HarnessRLError as error:
        print(error, file=sys.stderr)
        _report(link, error)
        return 2 if isinstance(error, UserError) else 1
    except Exception as error:  # the log gets the traceback, control the one line
        _report(link, error)
        raise
    finally:
        if link is not None:
            link.close()
    return 0


def _report(link: ControlLink | None, error: Exception) -> None:
    if link is None:
        return
    try:
        link.send("failed", error=type(error).__name__, message=str(error))
    except LinkError:
        print("learner: control is gone; the failure above could not be reported", file=sys.stderr)
