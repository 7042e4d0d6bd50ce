"""Every step of a sync, with an engine that is killed or stalls in it: a named error in time, and a sync that works afterwards."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, serve
from learner_helpers import tiny_policy
from test_sync import PROMPTS, Rig, new_engine

from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.gloo import GlooSender
from harness_rl.sync.verify import WeightProofFailed

BEFORE_RESUME = {
    "health": "health",
    "get_world_size": "connect",
    "init_weight_transfer_engine": "connect",
    "metrics": "load",
    "pause": "pause",
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
    "weight_info": "version",
    "reset_prefix_cache": "reset_prefix_cache",
    "resume": "resume",
}
"""Route -> the step that it belongs to."""
STEPS = BEFORE_RESUME | {"v1/models": "models", "v1/completions": "probe"}
DEADLINE_S = 1.0


@pytest.fixture
def engine() -> FakeEngine:
    return new_engine()


@pytest.fixture
def rig(engine: FakeEngine) -> Iterator[Rig]:
    with serve(engine) as url:
        made = Rig(tiny_policy(), [engine], [url], timeout_s=DEADLINE_S)
        yield made
        engine.healed.set()
        made.sync.close()


def with_time(rig: Rig) -> None:
    """Room for a sync on a slow machine."""
    for client in rig.sync._engines:
        client.timeout_s = 20.0
    rig.sync._sender._timeout = 20.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("route", STEPS)
def test_an_engine_that_stalls_is_named_by_its_step_and_synced_when_it_answers_again(rig: Rig, engine: FakeEngine, route: str) -> None:
    engine.stalled = {route}
    began = time.monotonic()
    with pytest.raises(SyncFailed, match=f"sync step '{STEPS[route]}'"):
        rig.sync.sync("k-0", PROMPTS)
    assert time.monotonic() - began < 5 * DEADLINE_S + 4
    if route in BEFORE_RESUME:
        assert "v1/completions" not in engine.calls, "nothing is proven of an update that failed"
    engine.stalled = set()
    engine.healed.set()
    with_time(rig)
    assert rig.sync.sync("k-0", PROMPTS).proof.ok and engine.weight_version == "k-0" and not engine.paused


@pytest.mark.parametrize("route", STEPS)
def test_an_engine_that_is_killed_is_named_and_the_one_that_takes_its_place_is_synced(rig: Rig, engine: FakeEngine, route: str) -> None:
    engine.killed_at = route
    began = time.monotonic()
    with pytest.raises(SyncFailed, match="sync step"):
        rig.sync.sync("k-0", PROMPTS)
    assert time.monotonic() - began < 5 * DEADLINE_S + 4
    port = int(rig.sync._engines[0].url.rpartition(":")[2])
    fresh = new_engine(9)
    with serve(fresh, port):
        with_time(rig)
        assert rig.sync.sync("k-0", PROMPTS).proof.ok and fresh.weight_version == "k-0"


@pytest.mark.parametrize(("route", "step"), [("update_weights", "update"), ("finish_weight_update", "finish")])
def test_one_of_two_engines_that_is_killed_is_told_at_once_whatever_the_other_does(route: str, step: str) -> None:
    engines = [new_engine(7), new_engine(8)]
    with serve(engines[0]) as a, serve(engines[1]) as b:
        rig = Rig(tiny_policy(), engines, [a, b], timeout_s=8.0)
        rig.sync.sync("k-0", PROMPTS)
        engines[1].killed_at = route
        engines[0].stalled = {"finish_weight_update"}
        rig.perturb()
        began = time.monotonic()
        with pytest.raises(SyncFailed, match=f"sync step '{step}': engine {b}"):
            rig.sync.sync("k-1", PROMPTS)
        assert time.monotonic() - began < 7.0, "not at the deadline"
        assert all(engine.paused for engine in engines)
        engines[0].healed.set()
        rig.sync.close()


def test_a_learner_that_died_in_an_update_is_followed_by_one_that_begins_it_again(rig: Rig, engine: FakeEngine) -> None:
    with_time(rig)
    rig.sync.sync("k-0", PROMPTS)
    rig.sync._engines[0].pause("keep", True)
    rig.sync._engines[0].start_update()  # and no more
    other = Rig(tiny_policy(), [engine], [rig.sync._engines[0].url])
    assert other.sync.sync("n-0", PROMPTS).proof.ok and engine.weight_version == "n-0"
    other.sync.close()


class Killed(BaseException):
    """Of the learner, at once: nothing of it runs any more."""


@pytest.mark.parametrize("step", ["pause", "start", "push", "finish", "version", "reset_prefix_cache", "resume"])
def test_a_learner_that_is_killed_after_any_step_is_followed_by_one_whose_weights_are_proven(
    rig: Rig, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whatever the engine then holds and whether it samples: the next learner's update begins at the first step and ends with a proof."""
    with_time(rig)
    rig.sync.sync("k-0", PROMPTS)
    rig.perturb()
    everywhere, push = rig.sync._everywhere, rig.sync._sender.push

    def killed_after(name: str, *args: Any) -> Any:
        found = everywhere(name, *args)
        if name == step and (name != "version" or engine.weight_version == "k-1"):
            raise Killed
        return found

    def pushed(engines: Any) -> Any:
        found = push(engines)
        if step == "push":
            raise Killed
        return found

    monkeypatch.setattr(rig.sync, "_everywhere", killed_after)
    monkeypatch.setattr(rig.sync._sender, "push", pushed)
    with pytest.raises(Killed):
        rig.sync.sync("k-1", PROMPTS)
    assert engine.paused is (step != "resume"), "it stands, or samples under a version that nobody proved"
    assert engine.weight_version == ("k-1" if step in ("finish", "version", "reset_prefix_cache", "resume") else "k-0")
    other = Rig(tiny_policy(), [engine], [rig.sync._engines[0].url])  # as its checkpoint was: other weights than those half pushed
    proof = other.sync.sync("n-0", PROMPTS).proof
    assert proof.ok and proof.mean_abs < 1e-4 and engine.weight_version == "n-0" and not engine.paused
    other.sync.close()


class Running(threading.Thread):
    """A call that samples a token every few milliseconds while the engine is not paused."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(daemon=True)
        self.engine, self.versions, self.ended = engine, [], False

    def run(self) -> None:
        while not self.ended:
            if not self.engine.paused:
                self.versions.append(self.engine.weight_version)
            time.sleep(0.002)


@pytest.mark.parametrize("fault", ["ignore_update", "stale_head", "shift_logprobs"])
def test_wrong_weights_with_calls_in_flight_stop_them_and_prove_nothing(rig: Rig, engine: FakeEngine, fault: str) -> None:
    with_time(rig)
    proven = {rig.sync.sync("k-0", PROMPTS).version}
    call = Running(engine)
    call.start()
    while not call.versions:
        time.sleep(0.001)
    rig.perturb()
    engine.faults = {fault}
    with pytest.raises(WeightProofFailed, match="k-1"):
        proven.add(rig.sync.sync("k-1", PROMPTS).version)
    time.sleep(0.05)
    sampled = list(call.versions)
    time.sleep(0.1)
    assert call.versions == sampled, "the call is frozen"
    assert {"k-0", "k-1"} == set(sampled) and proven == {"k-0"}, "what it sampled meanwhile waits for a proof that never comes"
    call.ended = True


def test_of_two_engines_wrong_weights_in_one_are_worse_news_than_the_death_of_the_other() -> None:
    engines = [new_engine(7), new_engine(8)]
    with serve(engines[0]) as a, serve(engines[1]) as b:
        rig = Rig(tiny_policy(), engines, [a, b])
        rig.sync.sync("k-0", PROMPTS)
        engines[1].faults, engines[0].killed_at = {"ignore_update"}, "v1/completions"
        rig.perturb()
        with pytest.raises(WeightProofFailed, match=b):
            rig.sync.sync("k-1", PROMPTS)
        assert engines[1].paused
        rig.sync.close()


def test_a_sender_that_stalls_is_told_by_a_receiver_whose_deadline_is_over() -> None:
    """As when a rank of the learner hangs in a gather: what its engines wait for does not come."""
    policy = tiny_policy()

    def weights() -> Any:
        for number, (name, parameter) in enumerate(policy.model.named_parameters()):
            yield name, parameter if number else Slow(parameter)

    with serve(new_engine()) as url:
        client = EngineClient(url, "policy", DEADLINE_S)
        sender = GlooSender(weights, torch.float32, DEADLINE_S)
        sender.connect([client])
        client.start_update()
        began = time.monotonic()
        with pytest.raises(SyncFailed, match="sync step 'update'"):
            sender.push([client])
        assert time.monotonic() - began < 10
        sender.close()
        client.close()


class Slow:
    """A parameter whose gather takes longer than the push may."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter, self.shape = parameter, parameter.shape

    def numel(self) -> int:
        return self.parameter.numel()

    def full_tensor(self) -> torch.Tensor:
        time.sleep(2 * DEADLINE_S)
        return self.parameter


def test_an_update_that_a_dead_learner_left_open_is_begun_again_though_its_refusal_ends_the_connection() -> None:
    """As uvicorn: after an answer of 500 the connection is gone, and that may show only once the next request is on it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        refused = False

        def do_POST(self) -> None:
            if self.refused:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
                return
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.refused = not asked
            asked.append(self.path)
            body = b"a weight update is already active" if self.refused else b"{}"
            self.send_response(500 if self.refused else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = EngineClient(f"http://127.0.0.1:{server.server_port}", "policy", 5.0)
    try:
        client.start_update()
    finally:
        client.close()
        server.shutdown()
        server.server_close()
    assert asked == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]
