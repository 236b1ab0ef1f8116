"""What a rank can wait in beside collectives: a key of a store, a group that is being made.

Each is a function of torch's that Python calls, and is told as it is entered and left, with what it waits for. To make
a group takes all ranks of the world, unless its members synchronise alone.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from workers.check.recording import Recorder
from workers.check.telling import now
from workers.measure import sockets
from workers.measure.sockets import Endpoint, NoDiagnostics

STORE = ("wait", "get", "multi_get")


class Waits:
    """Watches these functions; `install` once. `said` hears what the user has to know of a changed call."""

    def __init__(self, recorder: Recorder, said: Callable[[str], None], store_port: int) -> None:
        self._store_port = store_port  # its connections are no wire of the training's
        self._recorder, self._telling, self._said = recorder, recorder.telling, said
        self._inside = threading.local()  # .depth: torch's own waits inside of one are part of it

    def install(self) -> None:
        """Replace them where scripts and torch look them up."""
        c10d = dist.distributed_c10d
        for name in ("init_process_group", "new_group"):
            made = self._watched(getattr(c10d, name), name)
            setattr(c10d, name, made)
            setattr(dist, name, made)
        stores = [dist.Store, *(getattr(dist, each) for each in ("TCPStore", "FileStore", "HashStore", "PrefixStore"))]
        for store in dict.fromkeys(stores):
            for name in STORE:
                if name in vars(store):
                    setattr(store, name, self._watched(vars(store)[name], f"store.{name}"))
        for module in (c10d, dist):
            place: Any = module
            place.destroy_process_group = self._counted(place.destroy_process_group)

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **named: Any) -> Any:
            depth = getattr(self._inside, "depth", 0)
            if depth:
                return function(*args, **named)
            if name in ("init_process_group", "new_group"):
                args, named = self._on_gloo(args, named, 0 if name == "init_process_group" else 2)
            self._inside.depth = 1
            place, by_script = self._recorder.places.here(2)
            thread = threading.get_ident()
            told = (by_script or not name.startswith("store")) and not self._recorder.hidden()
            if told:
                waited_for = self._described(name, args, named)
                self._telling.say("enter", name, waited_for, place, thread, now())
            try:
                return function(*args, **named)
            finally:
                self._inside.depth = 0
                if told:
                    self._telling.say("leave", thread, now())

        return watched

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The sockets' counters go with the sockets."""

        @functools.wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            self.tell_sockets()
            return function(*args, **named)

        return counted

    def tell_sockets(self) -> None:
        """What each connection of this process has sent until now."""
        self._telling.say("sockets", [(near, far, sent) for (near, far), sent in self.sent().items()])

    def sent(self) -> dict[tuple[Endpoint, Endpoint], int]:
        """The bytes that each connection has sent, by its two ends; none where the system does not tell."""
        found = []
        with suppress(NoDiagnostics):
            found = list(sockets.connections().values())
        return {
            (each.local, each.remote): each.sent_bytes
            for each in found
            if self._store_port not in (each.local[1], each.remote[1])
        }

    def _on_gloo(self, args: tuple[Any, ...], named: dict[str, Any], position: int) -> tuple[tuple[Any, ...], Any]:
        """The same call with gloo where NCCL is asked for and no GPU is there."""
        if torch.cuda.is_available():
            return args, named
        backend = named.get("backend", args[position] if len(args) > position else None)
        if not isinstance(backend, str) or "nccl" not in backend.lower():
            return args, named
        self._said(f"backend {backend!r} was asked for: there is no GPU here, so gloo does its work")
        named = {name: value for name, value in named.items() if name not in ("device_id", "pg_options")}
        if "backend" in named or len(args) <= position:
            return args, named | {"backend": "gloo"}
        return (*args[:position], "gloo", *args[position + 1 :]), named

    def _described(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What is waited for: keys of a store, or the ranks of a new group and whether its members alone make it."""
        if name.startswith("store"):
            keys = args[1] if len(args) > 1 else named.get("keys", named.get("key", ""))
            return [str(each) for each in keys] if isinstance(keys, (list, tuple)) else [str(keys)]
        if name == "new_group":
            ranks = args[0] if args else named.get("ranks")
            return [None if ranks is None else sorted(ranks), bool(named.get("use_local_synchronization", False))]
        return []
