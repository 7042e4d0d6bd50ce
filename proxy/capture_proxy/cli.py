"""Command line of the proxy.

Invariant: a proxy that serves writes one line to stdout, when it is ready; everything else goes to stderr. SIGTERM and SIGINT end it
within seconds, and a wrong flag ends it with one line that says what to change.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from aiohttp import web

from capture_proxy import certify, replay, roles, volatile
from capture_proxy.admin import main_app
from capture_proxy.app import Proxy, server
from capture_proxy.auth import key_hash
from capture_proxy.front import check_store, serve_front
from capture_proxy.handoff import HandoffServer
from capture_proxy.settings import Settings
from capture_proxy.store import StoreError
from capture_proxy.worker import serve_worker

SHUTDOWN_S = 2.0


def parser() -> argparse.ArgumentParser:
    """The proxy's flags."""
    p = argparse.ArgumentParser(
        prog="capture-proxy",
        description="Records, token by token, what an agent asks of an engine.",
        epilog="`capture-proxy rules` lists the rules by which side calls and volatile text of known agents are told; "
        "`capture-proxy replay STORE` derives every trace of a store anew and compares; "
        "`capture-proxy certify` tries which conversations an engine's chat template lets go on by tokens.",
    )
    p.add_argument("--engine", action="append", required=True, metavar="URL", help="base URL of a vLLM server; may be repeated")
    p.add_argument("--model", required=True, metavar="NAME", help="the model name that the engines serve")
    p.add_argument("--store", required=True, type=Path, metavar="DIR", help="folder of the session logs")
    p.add_argument("--admin-key-file", required=True, type=Path, metavar="FILE", help="file that holds the admin key")
    p.add_argument("--host", default=Settings.host, help="address to listen on (default: %(default)s); any other than loopback needs TLS")
    p.add_argument("--port", type=int, default=Settings.port, help="port to listen on, 0 for any (default: %(default)s)")
    p.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM): serve HTTPS")
    p.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM), where --tls-cert does not hold it")
    p.add_argument("--insecure-remote", action="store_true", help="listen beyond loopback in plain HTTP")
    p.add_argument("--handoff-socket", type=Path, metavar="PATH", help="Unix socket on which control hands over listening sockets")
    p.add_argument("--workers", type=int, default=Settings.workers, metavar="N", help="processes that share the work")
    p.add_argument("--worker", help=argparse.SUPPRESS)  # the front starts its workers with it: INDEX:DESCRIPTOR:FOLDER
    p.add_argument("--capture", choices=("auto", "tokens", "chat"), default=Settings.capture, help="how to sample (default: %(default)s)")
    p.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="the model's tokenizer.json, for sessions that split quoted control tokens"
    )
    p.add_argument(
        "--salt-prefix-cache",
        action="store_true",
        help="sessions share cached blocks only under the weights they began with",
    )
    p.add_argument("--adapters", action="store_true", help="calls wait until a release names the adapter that they ask for")
    p.add_argument("--durability", choices=("process", "host"), default=Settings.durability, help="what a stored turn survives")
    return p


def settings_from(args: argparse.Namespace) -> Settings:
    """Checked settings. Raises `ValueError` with one line for the user."""
    try:
        key = args.admin_key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--admin-key-file: cannot read {args.admin_key_file} ({error}); create it with a random key") from error
    if len(key) < 16:
        raise ValueError(f"--admin-key-file: {args.admin_key_file} holds fewer than 16 characters; put a random key there")
    for url in args.engine:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--engine: {url!r} is no http(s) URL")
        if urlsplit(url).username is not None:
            raise ValueError("--engine: a URL with a name or password in it would show them in logs and traces; leave them out")
    tls = _tls(args.tls_cert, args.tls_key)
    if tls is None and not args.insecure_remote and not _is_loopback(args.host):
        raise ValueError(f"--host: {args.host!r} is not a loopback address; add --tls-cert and --tls-key, or --insecure-remote")
    if args.workers < 1:
        raise ValueError(f"--workers: must be 1 or more, got {args.workers}")
    if args.workers > 1 and tls is not None:
        raise ValueError("--workers: more than one cannot serve TLS; end TLS before the proxy, and let it listen on loopback")
    return Settings(
        engines=tuple(args.engine),
        model=args.model,
        store=args.store,
        admin_key_hash=key_hash(key),
        host=args.host,
        port=args.port,
        tls=tls,
        handoff_socket=args.handoff_socket,
        capture=args.capture,
        tokenizer=args.tokenizer,
        salt_prefix_cache=args.salt_prefix_cache,
        adapters=args.adapters,
        durability=args.durability,
        workers=args.workers,
    )


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    proxy = Proxy(settings)
    handoff: HandoffServer | None = None
    runner = server(main_app(proxy), SHUTDOWN_S)
    try:
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port, ssl_context=settings.tls)
        await site.start()
        if settings.handoff_socket is not None:
            handoff = HandoffServer(proxy, settings.handoff_socket)
            handoff.start()
        port = runner.addresses[0][1]
        _announce(settings, port)
        await stop.wait()
    finally:
        if handoff is not None:
            await handoff.close()
        await proxy.close()
        await runner.cleanup()


def _announce(settings: Settings, port: int) -> None:
    scheme = "http" if settings.tls is None else "https"
    print(f"capture-proxy listening on {scheme}://{settings.host}:{port}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after a signal, 1 when it cannot run, 2 for wrong input."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["rules"]:
        print(roles.listing())
        print(volatile.listing())
        return 0
    for name, command in (("replay", replay.main), ("certify", certify.main)):
        if arguments[:1] == [name]:
            return command(arguments[1:])
    args = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # One descriptor per open session and connection: use all that the system allows.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    try:
        settings = settings_from(args)
    except ValueError as error:
        print(f"capture-proxy: {error}", file=sys.stderr)
        return 2
    try:
        if args.worker is not None:
            index, fd, folder = args.worker.split(":", 2)
            ours = replace(settings, worker=int(index), store=settings.store / f"worker-{index}")
            uvloop.run(serve_worker(ours, Path(folder), socket.socket(fileno=int(fd))))
            return 0
        check_store(settings.store, settings.workers)
        if settings.workers > 1:
            uvloop.run(serve_front(settings, arguments, lambda port: _announce(settings, port)))
        else:
            uvloop.run(serve(settings))
    except (StoreError, OSError, ValueError) as error:
        print(f"capture-proxy: {error}", file=sys.stderr)
        return 1
    return 0


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The server's TLS, if there is a certificate. Raises `ValueError` with one line for the user."""
    if cert is None:
        if key is not None:
            raise ValueError("--tls-key: needs --tls-cert")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise ValueError(
            f"--tls-cert: cannot use {cert} with key {key or cert} ({error}); both must be PEM, the key without a password"
        ) from error
    return context


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
