"""`python -m polar.broker`: run one broker until SIGTERM or SIGINT.

Promises: one line with the bootstrap address on stdout when clients can connect (and in `--ready-file`); exit code 0
after a drained stop, 1 with one clear line on stderr when it cannot start, 2 for wrong usage, 3 when the disk failed.
"""

import argparse
import asyncio
import logging
import resource
import signal
import sys
from dataclasses import fields
from pathlib import Path

from polar.broker.broker import Broker
from polar.broker.errors import BrokerError, StorageFailed
from polar.broker.settings import BrokerSettings

_SWITCH_INTERVAL = 0.0005
"""Seconds a worker thread (compaction) may hold the interpreter while the loop wants it; Python's default is 5 ms."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m polar.broker",
        description="A single-node Kafka broker for one machine. For production, run Apache Kafka.",
    )
    parser.add_argument("--dir", type=Path, required=True, help="data directory, made when missing")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=9092, help="port to listen on, 0 for a free one (default: 9092)")
    parser.add_argument("--advertised-host", help="name that clients connect to (default: --host)")
    parser.add_argument("--allow-remote", action="store_true", help="listen on an address other machines can reach")
    parser.add_argument("--fsync", action="store_true", help="acknowledge what is on disk: survives power loss")
    parser.add_argument("--ready-file", type=Path, help="file to write the bootstrap address to when ready")
    parser.add_argument("--until-eof", action="store_true", help="stop when standard input ends: with the parent")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any other setting, such as max_connections=100; may be repeated",
    )
    return parser


def _settings(arguments: argparse.Namespace) -> BrokerSettings:
    known = {field.name: field.type for field in fields(BrokerSettings)}
    extra: dict[str, int | float] = {}
    for item in arguments.set:
        name, separator, value = item.partition("=")
        if not separator or known.get(name) not in (int, float):
            numbers = ", ".join(sorted(key for key, kind in known.items() if kind in (int, float)))
            raise BrokerError(f"--set {item}: has to be NAME=NUMBER with a name of: {numbers}")
        try:
            extra[name] = int(value) if known[name] is int else float(value)
        except ValueError as error:
            raise BrokerError(f"--set {item}: {value} is no number") from error
    return BrokerSettings(
        directory=arguments.dir,
        host=arguments.host,
        port=arguments.port,
        advertised_host=arguments.advertised_host,
        allow_remote=arguments.allow_remote,
        fsync=arguments.fsync,
        **extra,  # type: ignore[arg-type]
    )


class _UntilEof(asyncio.Protocol):
    """The parent holds the other end of standard input, so its end is the parent's, however that came."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping

    def connection_lost(self, error: Exception | None) -> None:
        self._stopping.set()


async def _run(settings: BrokerSettings, ready_file: Path | None, *, until_eof: bool) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if until_eof:
        await loop.connect_read_pipe(lambda: _UntilEof(stopping), sys.stdin)
    broker = Broker(settings)
    address = await broker.start()
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    if ready_file is not None:
        partial = ready_file.with_name(ready_file.name + ".part")
        partial.write_text(address + "\n")
        partial.replace(ready_file)
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait((waiting, broker.failed), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await broker.stop()
    if broker.failed.done():
        broker.failed.result()


def main() -> int:
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    sys.setswitchinterval(_SWITCH_INTERVAL)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        settings = _settings(arguments)
        try:
            import uvloop
        except ImportError:
            asyncio.run(_run(settings, arguments.ready_file, until_eof=arguments.until_eof))
        else:
            uvloop.run(_run(settings, arguments.ready_file, until_eof=arguments.until_eof))
    except StorageFailed as error:
        sys.stderr.write(f"polar.broker: {error}\n")
        return 3
    except BrokerError as error:
        sys.stderr.write(f"polar.broker: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
