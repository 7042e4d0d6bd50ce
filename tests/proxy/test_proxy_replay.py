"""Replay: whole stores hold up, and a log, a saved trace or a token that does not is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import FakeEngine
from proxy_helpers import Served

from capture_proxy import records
from capture_proxy.cli import main


async def two_sessions(served: Served, folder: Path) -> Path:
    """The store; the sessions' traces lie below `folder`."""
    for number in range(2):
        agent, created = await served.agent()
        await agent.ask()
        await agent.ask({"role": "user", "content": "go on"})
        place = folder / str(number)
        place.mkdir(parents=True)
        (place / "trace.bin").write_bytes((await served.admin.trace(created.session_id)).to_bytes())
    return served.proxy.settings.store


async def test_a_whole_store_holds_up(served: Served, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = await two_sessions(served, tmp_path / "traces")
    assert main(["replay", str(store), "--traces", str(tmp_path / "traces")]) == 0
    assert capsys.readouterr().out.startswith("2 sessions, 4 turns, ")
    assert main(["replay", str(store)]) == 0
    assert "0 saved traces compared: none wrong" in capsys.readouterr().out


async def test_a_torn_log_is_not_the_saved_trace(
    served: Served, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = await two_sessions(served, tmp_path / "traces")
    log = sorted(store.glob("*.log"))[0]
    log.write_bytes(log.read_bytes()[:-100])
    (store / "x.log").write_bytes(b"no log")
    assert main(["replay", str(store), "--traces", str(tmp_path / "traces")]) == 1
    said = capsys.readouterr().out
    assert f"{log.name}: " in said and "is another trace" in said and "x.log: " in said and said.strip().endswith(": 2 wrong")


@pytest.mark.parametrize(("array", "name"), [("tail", "prompt_hash"), ("completion", "completion_hash")])
async def test_what_was_stored_wrong_is_told_by_its_hash(
    served: Served,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    array: str,
    name: str,
) -> None:
    right = records.turn_to_record

    def wrong(turn: object) -> object:
        header, arrays = right(turn)  # type: ignore[arg-type]
        return header, {**arrays, array: arrays[array] + 1}

    monkeypatch.setattr(records, "turn_to_record", wrong)
    store = await two_sessions(served, tmp_path / "traces")
    assert main(["replay", str(store)]) == 1
    assert name in capsys.readouterr().out


def test_an_empty_store_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path)])
    assert ended.value.code == 2 and "holds no session logs" in capsys.readouterr().err
