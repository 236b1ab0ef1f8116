"""The page and what fills it, over HTTP: three addresses that can be read, and nothing that can be done.

    GET /          the page
    GET /events    server-sent events: a snapshot as JSON four times a second, and the last one as `end`
    GET /state     one snapshot

Any other method is 405. A name that is not this machine's own is refused, so that no site elsewhere can have a browser
read the page by a name that it points to 127.0.0.1.
"""

import asyncio
import base64
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from distlab.config import ConfigError
from distlab.live.state import Reader, Snapshot
from distlab.report import progress
from distlab.report.html import asset, render
from distlab.report.progress import PERIOD_S
from distlab.report.reading import BrokenRecord

# Which run is shown: the one that was named, or of a folder of runs the newest, and after it the next.
#
# Of a folder of runs the shown one is kept until it is over, so that two that go on side by side do not alternate.

LOOK_S = 1.0  # between two looks for a newer run
APART_S = 5.0  # containers that are started together begin so much earlier or later


class Runs:
    """Snapshots of the run in `folder`, or of the newest in a folder of runs; `new`: of those that begin from now on.

    Raises ConfigError where there is no such folder, or that of a run which shows nothing.
    """

    def __init__(self, folder: Path, *, new: bool = False) -> None:
        if not folder.is_dir() and not new:  # the first run makes it
            known = "name that of a run, such as runs/latest, or runs/; `distlab live` without a name starts a run"
            raise ConfigError([f"{str(folder)!r} is not a folder: {known}"])
        self._folder = folder.resolve()
        self._since = time.time() - APART_S if new else 0.0
        self._reader: Reader | None = None
        self._shown = Snapshot(0.0)
        self._looked_at = -LOOK_S
        if is_run(self._folder):
            if not progress.places(self._folder):
                raise ConfigError([f"{str(folder)!r} shows nothing: its ranks ran without LAB_LIVE=1"])
            self._reader, self._looked_at = Reader(self._folder), float("inf")

    def snapshot(self) -> Snapshot:
        """What is to be shown now."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S and self._shown.verdict != "running":
            self._looked_at = now
            newest = self._newest()
            if newest is not None and (self._reader is None or self._reader.folder != newest):
                self._reader = Reader(newest)
        self._shown = self._reader.snapshot(now) if self._reader is not None else Snapshot(now)
        return self._shown

    def _newest(self) -> Path | None:
        """The run that was written to last, of those that show themselves and began late enough."""
        written: list[tuple[float, Path]] = []
        for folder in self._folder.iterdir() if self._folder.is_dir() else []:
            if not folder.is_symlink():  # runs/latest
                for path in progress.places(folder).values():
                    with suppress(OSError):
                        written.append((path.stat().st_mtime, path))
        for written_at, path in sorted(written, reverse=True):
            with suppress(BrokenRecord):
                if written_at >= self._since and progress.read_status(path).began_at >= self._since:
                    return path.parent
        return None


def is_run(folder: Path) -> bool:
    """Whether it is the folder of one run, and not of all runs."""
    return (folder / ".run").exists() or any(folder.glob("rank*.jsonl")) or bool(progress.places(folder))


# The page: one document that fetches nothing but snapshots of its own server, and holds nothing that acts on a run. The
# policy names its script and its style by their hashes, so that nothing else on it could run.

STYLE = asset("page.css") + asset("live.css")


def hashed(text: str) -> str:
    """How a policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {hashed(asset('live.js'))}; style-src {hashed(STYLE)}; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOSTS = ["127.0.0.1", "localhost"]
MOST_CLIENTS = 32
END_S = 2  # for those who look, to take in the last snapshot
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Feed:
    """The newest snapshot as JSON; the files are read once a period at most, however many look."""

    def __init__(self, runs: Runs) -> None:
        self._runs, self._text, self._read_at = runs, "", 0.0
        self._lock = asyncio.Lock()

    async def read(self) -> str:
        """The run now."""
        async with self._lock:
            if not self._text or time.monotonic() - self._read_at > PERIOD_S / 2:
                self._text = await asyncio.to_thread(self._snapshot)
                self._read_at = time.monotonic()
            return self._text

    def _snapshot(self) -> str:
        return json.dumps(asdict(self._runs.snapshot()), allow_nan=False)


class ReadOnly:
    """Lets no method through but GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] != "GET":
            app = PlainTextResponse("this page can only be read\n", 405, {"Allow": "GET"})
        await app(scope, receive, send)


def application(feed: Feed, ending: Callable[[], bool]) -> Starlette:
    """The three addresses; a stream of events ends when `ending` says so."""

    async def events() -> AsyncIterator[str]:
        while not ending():
            yield f"data: {await feed.read()}\n\n"
            await asyncio.sleep(PERIOD_S)
        yield f"event: end\ndata: {await feed.read()}\n\n"

    async def root(_: Request) -> Response:
        return HTMLResponse(render("live.html", style=STYLE))

    async def state(_: Request) -> Response:
        return Response(await feed.read(), media_type="application/json")

    async def stream(_: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [Route("/", root), Route("/state", state), Route("/events", stream)]
    guards = [Middleware(ReadOnly), Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)]
    return Starlette(routes=routes, middleware=guards)


class Server(uvicorn.Server):
    """Says that it serves once it answers to signals: one that came before would be an exception anywhere."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], object]) -> None:
        super().__init__(config)
        self._say_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()


async def serve(
    runs: Runs, listening: socket.socket, started: Callable[[], object], *, until_stdin_ends: bool = False
) -> None:
    """Answer on `listening` until a signal comes; beside local ranks, until their launcher closes this process's
    input. `started` is called once it answers."""
    app = application(Feed(runs), lambda: server.should_exit)
    server = Server(
        uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", log_level="warning", access_log=False,
            server_header=False, headers=list(HEADERS.items()), limit_concurrency=MOST_CLIENTS,
            timeout_graceful_shutdown=END_S,
        ),
        started,
    )  # fmt: skip
    if until_stdin_ends:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _end_with_stdin, server)
    await server.serve(sockets=[listening])


def _end_with_stdin(server: uvicorn.Server) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        server.should_exit = True
