"""The page beside local ranks: a process of its own, begun before them and ended once they have ended.

Its port is opened here, so that one that is taken is refused before any rank starts. The ranks are forked from this
process, which therefore imports no server; what runs it ends when its standard input does, and so outlives nobody.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distlab.config import Config, ConfigError

LOOPBACK = "127.0.0.1"
END_S = 5.0  # for the last snapshot to reach those who look


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
