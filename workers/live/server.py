"""The page and what fills it, over HTTP: three addresses that can be read, and nothing that can be done.

    GET /          the page
    GET /events    server-sent events: a snapshot as JSON four times a second, and the last one as `end`
    GET /state     one snapshot

Any other method is 405. A name that is not this machine's own is refused, so that no site elsewhere can have a browser
read the page by a name that it points to 127.0.0.1.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from workers.live.page import POLICY, page
from workers.live.runs import Runs
from workers.live.state import clock_s
from workers.report.live import PERIOD_S

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
            if not self._text or clock_s() - self._read_at > PERIOD_S / 2:
                self._text = await asyncio.to_thread(self._snapshot)
                self._read_at = clock_s()
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
        return HTMLResponse(page())

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
