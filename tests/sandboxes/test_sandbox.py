"""A real sandbox: what it contains, what it limits, what is left of it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shell import sh

from harness_rl.sandboxes import transfer
from harness_rl.sandboxes.errors import RuntimeRequestError, SandboxBuildFailedError
from harness_rl.sandboxes.launch import DEFAULT_PATH
from harness_rl.sandboxes.ledger import Ledger
from harness_rl.sandboxes.reaper import audit
from harness_rl.sandboxes.sandbox import Sandbox, SandboxSpec

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]


async def _gone(count: Any, deadline_s: float = 2.0) -> bool:
    end = time.monotonic() + deadline_s
    while count():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


def _host_processes(word: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += word in path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
    return found


async def test_commands_run_with_their_user_folder_and_environment(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    result = await sh(sandbox, "pwd; id -u; echo $GREETING $HOME; echo oops >&2; exit 3", cwd="/usr", env={"GREETING": "hello"})
    assert (result.code, result.stdout, result.stderr) == (3, b"/usr\n0\nhello /root\n", b"oops\n")
    assert (
        await sh(sandbox, "id -un; echo $HOME; touch /tmp/x && ls -l /tmp/x | cut -d' ' -f3", user="nobody")
    ).stdout == b"nobody\n/nonexistent\nnobody\n"
    assert (await sh(sandbox, "id -u; cat /etc/shadow", user=1234)).stdout == b"1234\n"
    for options, message in (({"user": "ghost"}, b"no user 'ghost'"), ({"cwd": "/ghost"}, b"cannot change to directory /ghost")):
        failed = await sh(sandbox, "true", **options)
        assert failed.code == 126 and message in failed.stderr
    assert (await sandbox.exec(["/bin/ghost"])).code == 126
    assert (await sh(sandbox, "kill -9 $$")).code == 137
    assert (await sh(sandbox, "wc -c <<< $BIG", env={"BIG": "x" * 100_000})).stdout == b"100001\n"


async def test_f14_locale_is_utf8(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    result = await sh(sandbox, "locale charmap; python3 -c 'import sys; print(sys.stdout.encoding, \"\\U0001F44B\")'")
    assert result.stdout.decode() == "UTF-8\nutf-8 \U0001f44b\n"


async def test_f01_time_out_kills_children_that_left_their_group(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    command = "trap '' TERM INT; setsid sh -c 'sleep 4321.5' & setsid nohup sleep 4321.5 >/dev/null 2>&1 & while :; do :; done"
    begun = time.monotonic()
    result = await sh(sandbox, command, timeout_s=1)
    assert result.timed_out and result.code == 124 and time.monotonic() - begun < 3
    assert await _gone(lambda: _host_processes("4321.5"))
    assert (await sh(sandbox, "echo still here")).stdout == b"still here\n"


async def test_cancellation_kills_the_command(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    task = asyncio.ensure_future(sh(sandbox, "setsid sleep 4322.5 & sleep 4322.5"))
    while _host_processes("4322.5") < 2:
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _gone(lambda: _host_processes("4322.5"))
    early = asyncio.ensure_future(sh(sandbox, "sleep 4323.5"))
    await asyncio.sleep(0)
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    await asyncio.sleep(0.1)
    assert _host_processes("4323.5") == 0


async def test_f02_background_child_that_holds_stdout_does_not_hold_the_call(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    begun = time.monotonic()
    result = await sh(sandbox, "sleep 4324.5 & echo started")
    assert result.stdout == b"started\n" and time.monotonic() - begun < 2
    assert _host_processes("4324.5") == 1  # a service may live on until the session's processes are killed
    assert await sandbox.kill_commands() == 1
    assert await _gone(lambda: _host_processes("4324.5"))


async def test_memory_hog_dies_and_the_sandbox_lives(start_sandbox: Any) -> None:
    sandbox = await start_sandbox(limits={"memory_mb": 256, "storage_mb": 64})
    result = await sh(sandbox, "python3 -c 'x = bytearray(600 << 20); print(len(x))'", timeout_s=30)
    assert result.code == 137 and result.stdout == b""
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_fork_bomb_is_contained_and_gives_its_processes_back(start_sandbox: Any) -> None:
    sandbox = await start_sandbox(limits={"pids": 40})
    for _ in range(2):
        await sh(sandbox, "bomb() { bomb | bomb & }; bomb; sleep 0.5", timeout_s=2)
        await sandbox.kill_commands()
        assert (await sh(sandbox, "echo a b c d | tr ' ' '\\n' | sort -r | head -1 | cat")).stdout == b"d\n"


async def test_orphans_do_not_use_the_sandbox_up(start_sandbox: Any) -> None:
    sandbox = await start_sandbox(limits={"pids": 40})
    result = await sh(sandbox, "for i in {1..120}; do (setsid true &); done; sleep 0.3; cat /proc/[0-9]*/stat | grep -c ' Z '")
    assert (result.stdout, result.stderr) == (b"0\n", b"")


async def test_quota_on_tmpfs_and_on_a_disk_image(start_sandbox: Any) -> None:
    for limits in ({"memory_mb": 512, "storage_mb": 64}, {"memory_mb": 128, "storage_mb": 96}):
        sandbox = await start_sandbox(limits=limits)
        result = await sh(
            sandbox, "dd if=/dev/zero of=/var/tmp/big bs=1M count=200 2>&1 | tail -1; du -m /var/tmp/big | cut -f1", timeout_s=30
        )
        assert b"No space" in (await sh(sandbox, "dd if=/dev/zero of=/var/tmp/more bs=1M count=200", timeout_s=30)).stderr
        assert 10 < int(result.stdout.split()[-1]) <= limits["storage_mb"]
        assert (await sh(sandbox, "rm /var/tmp/big /var/tmp/more; echo ok > /root/x; cat /root/x")).stdout == b"ok\n"
        await sandbox.stop()


async def test_output_is_capped(start_sandbox: Any) -> None:
    sandbox = await start_sandbox(limits={"output_mb": 1})
    result = await sh(sandbox, "head -c 5000000 /dev/zero")
    assert result.truncated and len(result.stdout) <= 1 << 20
    assert not (await sh(sandbox, "echo x | tee /dev/stderr > /dev/stdout")).truncated


async def test_privileges_are_really_dropped(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    status = (await sh(sandbox, "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")).stdout.decode().split()
    fields = dict(zip(status[::2], status[1::2], strict=True))
    assert fields["CapBnd:"] == fields["CapEff:"] == fields["CapPrm:"] == "00000000800404fb" and int(fields["CapInh:"], 16) == 0
    assert fields["NoNewPrivs:"] == "1" and fields["Seccomp:"] == "2"
    assert b"CapEff:\t0000000000000000" in (await sh(sandbox, "cat /proc/self/status", user="nobody")).stdout
    for command in (
        "unshare -r true",
        "unshare -m true",
        "nsenter -t 1 -m true",
        "mknod /tmp/disk b 8 0",
        "chroot / mount -t tmpfs none /mnt",
        "python3 -c 'import ctypes; raise SystemExit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)'",
        'python3 -c \'import ctypes; raise SystemExit(ctypes.CDLL(None).mount(b"none", b"/mnt", b"tmpfs", 0, 0) != 0)\'',
        "python3 -c 'import socket; socket.socket(40, 1)'",
        "python3 -c 'import socket; socket.socket(socket.AF_PACKET, 3)'",
        "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "kill -9 1 && ! kill -0 1",
        "touch /dev/x",
        "hostname other",
    ):
        assert (await sh(sandbox, command)).code != 0, command
    assert (await sh(sandbox, "mkfifo /tmp/pipe && test -p /tmp/pipe")).code == 0


async def test_nothing_of_the_host_is_visible(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    seen = (
        await sh(sandbox, "ls -d /sys /proc/[0-9]* | wc -l; hostname; cat /proc/self/mountinfo | grep -c ' / / '; ls /dev")
    ).stdout.decode()
    assert int(seen.split()[0]) <= 6 and "sandbox" in seen and "loop" not in seen and "sda" not in seen and "vda" not in seen
    assert (await sh(sandbox, f"ls {Path(__file__).parent}")).code != 0
    assert (await sh(sandbox, "cat /proc/kcore /proc/keys /proc/kallsyms /proc/timer_list 2>/dev/null | wc -c")).stdout == b"0\n"


async def test_only_the_one_port_leads_out(start_sandbox: Any) -> None:
    listeners: list[socket.socket] = []

    async def take(listener: socket.socket) -> None:
        listeners.append(listener)

    with socket.create_server(("127.0.0.1", 0)) as host:
        port = host.getsockname()[1]
        sandbox = await start_sandbox(on_listener=take, port=18080)
        assert audit().listeners == 1
        (listener,) = listeners
        connect = (
            "python3 -c 'import socket,sys; s=socket.create_connection((sys.argv[1], int(sys.argv[2])), 2); print(s.recv(9).decode())' "
        )
        call = asyncio.ensure_future(sh(sandbox, connect + "127.0.0.1 18080"))
        listener.setblocking(False)
        connection, _address = await asyncio.get_running_loop().sock_accept(listener)
        connection.sendall(b"welcome")
        connection.close()
        assert (await call).stdout == b"welcome\n"
        for place in (f"127.0.0.1 {port}", "10.0.0.1 80", "198.51.100.1 80"):
            assert (await sh(sandbox, connect + place)).code != 0
        assert (await sh(sandbox, "getent hosts example.org")).code != 0
        listener.close()
        assert (await sh(sandbox, connect + "127.0.0.1 18080")).code != 0


async def test_sessions_do_not_share_files_or_ports(start_sandbox: Any) -> None:
    one, two = await asyncio.gather(start_sandbox(), start_sandbox())
    await sh(one, "echo secret > /root/secret; echo secret > /dev/shm/secret; rm -rf /usr/bin/git")
    assert (await sh(two, "cat /root/secret /dev/shm/secret; test -x /usr/bin/git && echo whole")).stdout == b"whole\n"


async def test_transfers_cannot_be_tricked(start_sandbox: Any, tmp_path: Path) -> None:
    sandbox = await start_sandbox()
    (tmp_path / "up" / "sub").mkdir(parents=True)
    (tmp_path / "up" / "sub" / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "up" / "sub" / "run").chmod(0o755)
    await transfer.upload_dir(sandbox, tmp_path / "up", "/new/place")
    assert (await sh(sandbox, "/new/place/sub/run; stat -c %U /new/place/sub/run")).stdout == b"ran\nroot\n"
    await sh(sandbox, "ln -s /etc /trap; ln -s /etc/hostname /new/file")
    await transfer.upload_file(sandbox, tmp_path / "up" / "sub" / "run", "/new/file")
    assert (await sh(sandbox, "cat /etc/hostname; test -L /new/file || echo replaced")).stdout == b"sandbox\nreplaced\n"

    links = "ln -s / /out/root; ln -s ../../.. /out/deep/up; ln /out/deep/file /out/hard"
    await sh(sandbox, f"mkdir -p /out/deep; mkfifo /out/pipe; echo x > /out/deep/file; {links}")
    skipped = await transfer.download_dir(sandbox, "/out", tmp_path / "down")
    assert sorted(str(path.relative_to(tmp_path / "down")) for path in (tmp_path / "down").rglob("*")) == ["deep", "deep/file", "hard"]
    assert len(skipped) == 3
    await transfer.download_file(sandbox, "/out/deep/file", tmp_path / "one")
    assert (tmp_path / "one").read_text() == "x\n"
    (tmp_path / "aim").write_text("untouched")
    (tmp_path / "linked").symlink_to(tmp_path / "aim")
    await transfer.download_file(sandbox, "/out/deep/file", tmp_path / "linked")
    assert (tmp_path / "aim").read_text() == "untouched"
    with pytest.raises(RuntimeRequestError, match="download of /ghost failed"):
        await transfer.download_dir(sandbox, "/ghost", tmp_path / "ghost")


async def test_transfer_limits_hold(start_sandbox: Any, tmp_path: Path) -> None:
    sandbox = await start_sandbox(limits={"transfer_mb": 1, "download_mb": 1})
    await sh(sandbox, "mkdir /out; head -c 3000000 /dev/zero > /out/big; truncate -s 1T /out/sparse")
    with pytest.raises(RuntimeRequestError):
        await transfer.download_dir(sandbox, "/out", tmp_path / "down")
    with pytest.raises(RuntimeRequestError):
        await transfer.download_file(sandbox, "/out/big", tmp_path / "big")


async def test_what_a_session_leaves_on_the_host_is_bounded_in_total(start_sandbox: Any, tmp_path: Path) -> None:
    """A sparse file costs no quota inside; outside it is refused by its length. The agent's files do not use up the verifier's share."""
    sandbox = await start_sandbox(limits={"download_mb": 8})
    await sh(sandbox, "mkdir /sparse /five; truncate -s 1000M /sparse/x; head -c 5000000 /dev/zero > /five/x; cp /five/x /logs/verifier/x")
    with pytest.raises(RuntimeRequestError, match="download of /sparse failed"):
        await transfer.download_dir(sandbox, "/sparse", tmp_path / "sparse")
    await transfer.download_dir(sandbox, "/five", tmp_path / "one")
    with pytest.raises(RuntimeRequestError, match="download of /five"):
        await transfer.download_dir(sandbox, "/five", tmp_path / "two")
    with pytest.raises(RuntimeRequestError, match=r"download of /logs/verifier/\.\./\.\./five/x failed"):
        await transfer.download_file(sandbox, "/logs/verifier/../../five/x", tmp_path / "three")
    await transfer.download_dir(sandbox, "/logs/verifier", tmp_path / "verifier")
    assert [(tmp_path / name / "x").exists() for name in ("sparse", "one", "two", "verifier")] == [False, True, False, True]


async def test_output_streams_while_the_command_runs(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    seen: list[tuple[float, str]] = []

    async def watch(text: str, stream: str) -> None:
        seen.append((time.monotonic(), f"{stream}:{text}"))

    result = await sh(sandbox, "echo one; sleep 0.8; echo two >&2", on_output=watch)
    assert [text for _moment, text in seen] == ["stdout:one\n", "stderr:two\n"] and seen[1][0] - seen[0][0] > 0.2
    assert result.stdout == b"one\n"


async def test_a_dead_supervisor_ends_everything_and_is_named(start_sandbox: Any) -> None:
    sandbox: Sandbox = await start_sandbox()
    call = asyncio.ensure_future(sh(sandbox, "sleep 4325.5"))
    while not _host_processes("4325.5"):
        await asyncio.sleep(0.02)
    entry = next(iter(Ledger.at().entries()))
    os.kill(entry.supervisor_pid, 9)
    with pytest.raises(RuntimeRequestError, match="the sandbox is gone"):
        await call
    assert await _gone(lambda: _host_processes("4325.5"))
    with pytest.raises(RuntimeRequestError):
        await sh(sandbox, "true")


async def test_a_failed_boot_says_why_and_leaves_nothing(start_sandbox: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for lowers in ((tmp_path / "empty",), (tmp_path / "ghost",)):
        with pytest.raises(SandboxBuildFailedError, match="sandbox cannot start"):
            await Sandbox.start(SandboxSpec(lowers=lowers))
    assert audit().total == 0


async def test_a_refused_hand_over_is_an_infrastructure_failure(start_sandbox: Any) -> None:
    async def refuse(_listener: socket.socket) -> None:
        raise ConnectionError("the proxy is gone")

    with pytest.raises(SandboxBuildFailedError, match="could not be handed over: the proxy is gone"):
        await start_sandbox(on_listener=refuse, port=18080)
    assert audit().total == 0


async def test_clean_works_when_the_tools_were_replaced(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    await sh(sandbox, "echo 1 > /logs/verifier/reward.txt; cp /bin/true /bin/rm; cp /bin/true /usr/bin/find; ln -s /etc /tests/etc")
    report = await sandbox.clean(["/logs/verifier", "/tests"])
    assert set(report["found"]) == {"/logs/verifier/reward.txt", "/tests/etc"} and report["count"] == 2
    assert {"/usr/bin/rm", "/usr/bin/find"} == set(report["replaced"])
    assert (await sh(sandbox, "ls -A /logs/verifier /tests; ls /etc/hostname")).stdout.decode().split() == [
        "/logs/verifier:",
        "/tests:",
        "/etc/hostname",
    ]


SITE = "/root/.local/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("attack", "found"),
    [
        ("/usr/bin/rm /bin; mkdir /bin; ln -s /usr/bin/* /bin/", ["/bin"]),
        ("/usr/bin/rm /sbin; ln -s /tmp /sbin", ["/sbin"]),
        ("mkdir /tmp/lib; ln -s /usr/lib/* /tmp/lib/; ln -sfn /tmp/lib /lib", ["/lib"]),
        ("rm /usr/bin/tee", ["/usr/bin/tee"]),
        ("rm -r /usr/lib/python3/dist-packages; mkdir /usr/lib/python3/dist-packages", None),
        ("mkdir -p /usr/local/sbin; ln -s /bin/true /usr/local/sbin/timeout", ["/usr/local/sbin/timeout (in front of another)"]),
        (f"mkdir -p {SITE}; echo import os > {SITE}/x.pth", [f"{SITE}/x.pth (loaded by itself)"]),
        ("sed -i s,/root,/tmp, /etc/passwd", ["/etc/passwd"]),
        ("ln -sfn /tmp/awk /etc/alternatives/awk", ["/etc/alternatives/awk"]),
        ("echo >> /lib/x86_64-linux-gnu/libc.so.6", ["/usr/lib/x86_64-linux-gnu/libc.so.6"]),
    ],
)
async def test_replaced_programs_are_seen_wherever_they_are(start_sandbox: Any, attack: str, found: list[str] | None) -> None:
    sandbox = await start_sandbox()
    await sh(sandbox, attack)
    report = await sandbox.clean(["/tests"], search=DEFAULT_PATH.split(":"), work="/app")
    if found is None:
        assert len(report["replaced"]) > 3 and all(name.startswith("/usr/lib/python3/dist-packages/") for name in report["replaced"])
    else:
        assert report["replaced"] == found
    assert report["hindered"] == []


async def test_installed_packages_are_not_taken_for_replaced_programs(start_sandbox: Any, tmp_path: Path) -> None:
    """pip without a network, a library that the loader is told of, an account, a touched file; a compiled module goes."""
    sandbox = await start_sandbox()
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "setup.py").write_text("from setuptools import setup\nsetup(name='mine', version='1', py_modules=['mine'])\n")
    (tmp_path / "p" / "mine.py").write_text("")
    await transfer.upload_dir(sandbox, tmp_path / "p", "/app/p")
    install = "cd /app/p && pip install -q --no-build-isolation --break-system-packages --no-deps . && python3 -c 'import mine'"
    assert (await sh(sandbox, install)).code == 0
    library = "sed s/libz.so.1/libq.so.1/g /lib/x86_64-linux-gnu/libz.so.1 > /usr/local/lib/libq.so.1; ldconfig; ldconfig -p | grep libq"
    assert (await sh(sandbox, library)).code == 0
    assert (await sh(sandbox, "useradd -m me && touch /usr/bin/git && printf x > /usr/local/bin/mine")).code == 0
    pyc = "/usr/lib/python3.11/__pycache__/os.cpython-311.opt-1.pyc"
    assert (await sh(sandbox, f"echo bad > {pyc}; ls {pyc}")).code == 0
    report = await sandbox.clean(["/tests"], search=DEFAULT_PATH.split(":"), work="/app")
    assert (report["replaced"], report["hindered"]) == ([], [])
    assert (await sh(sandbox, f"ls {pyc}")).code != 0


async def test_what_is_in_a_verifiers_way_is_named(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    deep = "cd /tests; for i in $(seq 400); do mkdir aaaaaaaaaaaaaaaaaaaa; cd aaaaaaaaaaaaaaaaaaaa; done"
    await sh(sandbox, f"{deep}; head -c 200000000 /dev/zero > /app.bin")
    report = await sandbox.clean(["/tests"])
    assert report["count"] == 400 and (await sh(sandbox, "ls -A /tests")).stdout == b""
    assert len(report["hindered"]) == 1 and report["hindered"][0].startswith("its disk quota is full: ")
    await sh(sandbox, "rm /app.bin")
    assert (await sandbox.clean(["/tests"]))["hindered"] == []
    await sh(sandbox, "mkdir /many; cd /many; seq 60000 | xargs touch")
    assert "files are left" in (await sandbox.clean(["/tests"]))["hindered"][0]


async def test_limits_of_processes_hold_and_a_server_of_one_command_answers_the_next(start_sandbox: Any) -> None:
    sandbox = await start_sandbox()
    shown = (await sh(sandbox, "ulimit -c; ulimit -Hn; ulimit -Hl")).stdout.split()
    assert shown[0] == b"0" and int(shown[1]) <= 20_000 and int(shown[2]) <= 8192
    assert (await sh(sandbox, "ulimit -Hc unlimited")).code != 0
    server = "setsid nohup python3 -m http.server 8123 --bind 127.0.0.1 --directory /etc > /dev/null 2>&1 &"
    assert (await sh(sandbox, server)).code == 0
    ask = "for i in $(seq 50); do curl -sf http://127.0.0.1:8123/hostname && break; sleep 0.1; done"
    assert (await sh(sandbox, ask)).stdout == b"sandbox\n"


async def test_a_disk_that_is_nearly_full_refuses_a_sandbox_by_name(
    start_sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1 << 30))
    with pytest.raises(
        SandboxBuildFailedError, match=r"has 1024 MiB free, but a sandbox with storage_mb = 400 needs 1424: free disk space"
    ):
        await start_sandbox(limits={"storage_mb": 400})
    assert audit().total == 0
