"""The page of a run while it goes on: `distlab live [MODE] [NAME=VALUE ...]` starts a run and serves it until it ends;
`distlab live RUN` serves one that was started elsewhere with LAB_LIVE=1.

It can only be read, and only on this machine: http://127.0.0.1:8765, or the port of LAB_LIVE_PORT. Exit codes: 0, 2
where the folder or the port is refused, 130 by Ctrl-C.

Beside local ranks it is a process of its own (`served`), begun before them and ended once they have ended. Its port is
opened by the launcher, so that one that is taken is refused before any rank starts. The ranks are forked from the
launcher, which therefore imports no server; what runs it ends when its standard input does, and so outlives nobody.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from distlab.config import Config, ConfigError
from distlab.report.standard_streams import printed

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
END_S = 5.0  # for the last snapshot to reach those who look


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the end; returns the exit code."""
    asked = parser().parse_args(arguments)
    try:
        port = Config.read().live_port
        from distlab.live.server import (
            Runs,
            serve,  # the server takes half a second: not for --help
        )

        runs = Runs(asked.run, new=asked.new)
        if asked.socket is not None:
            listening = socket.socket(fileno=asked.socket)
        else:
            listening = open_port(port, EVERYWHERE if asked.in_container else LOOPBACK)
    except ConfigError as error:
        for fault in error.faults:
            print(f"refused    {fault}", file=sys.stderr, flush=True)
        return 2
    try:
        say = partial(printed, f"live       http://{LOOPBACK}:{port}")
        asyncio.run(serve(runs, listening, say, until_stdin_ends=asked.socket is not None))
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="distlab live", description=__doc__)
    made.add_argument("run", type=Path, metavar="RUN", help="folder of a run; that of all runs shows the newest")
    made.add_argument("--new", action="store_true", help="of all runs only those that begin from now on")
    made.add_argument(
        "--in-container",
        action="store_true",
        help="on all addresses, where a container's port is published on loopback",
    )
    made.add_argument("--socket", type=int, help=argparse.SUPPRESS)  # that of a launcher: the end comes with its pipe
    return made


def open_port(port: int, address: str = LOOPBACK) -> socket.socket:
    """A socket that listens there; raises ConfigError where it cannot."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(
            [f"LAB_LIVE_PORT={port} cannot be opened on {address} ({why}): choose another port"]
        ) from None


@contextmanager
def served(config: Config) -> Iterator[None]:
    """Serve the page of the run that begins now, until the block ends; raises ConfigError where the port is taken."""
    command = [sys.executable, "-m", "distlab.cli.live", str(config.runs_dir), "--new", "--socket"]
    with open_port(config.live_port) as listening:
        server = subprocess.Popen(
            [*command, str(listening.fileno())], pass_fds=[listening.fileno()], stdin=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the ranks, whose end is shown
        )  # fmt: skip
    assert server.stdin is not None
    try:
        yield
    finally:
        server.stdin.close()
        try:
            server.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
