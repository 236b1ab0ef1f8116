"""The page of a run while it goes on: `distlab live [MODE] [NAME=VALUE ...]` starts a run and serves it until it ends;
`distlab live RUN` serves one that was started elsewhere with LAB_LIVE=1.

It can only be read, and only on this machine: http://127.0.0.1:8765, or the port of LAB_LIVE_PORT. Exit codes: 0, 2
where the folder or the port is refused, 130 by Ctrl-C.
"""

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from distlab.config import Config, ConfigError
from distlab.live.server_process import LOOPBACK, open_port
from distlab.report.standard_streams import printed

EVERYWHERE = "0.0.0.0"


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


if __name__ == "__main__":
    sys.exit(main())
