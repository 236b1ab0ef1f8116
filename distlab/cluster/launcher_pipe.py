"""What the launcher knows of local ranks, for those that have not met yet: a rank whose sibling has died ends at once.

The launcher hands each rank one end of a socket and names it in the environment. A rank tells it that it has joined;
until then it ends with 3 as soon as it is told who died, even while torch is being imported. After that the watch
speaks. A rank that refused its settings or said why it broke has spoken for itself, and the others come to the same
words by themselves while they can: they heed the launcher only when they begin to wait for the one that is gone.
"""

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distlab.cluster.authenticated_messages import SURROGATE
from distlab.cluster.message_signer import MAX_TEXT, cut
from distlab.report.standard_streams import printed

VARIABLE = "DISTLAB_PARENT"  # the number of a rank's descriptor
# Of a launcher's words: who died, and that nobody hears any more what the ranks say.
SHAPES = ({"sentence": str, "spoke": bool}, {"unheard": str})
JOINED, MAY_LEAVE = b"joined", b"may leave"


class LauncherPipe:
    """A rank's end; where no launcher has started it, nothing is ever heard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = self._joined = False
        self._word: dict[str, Any] | None = None
        self._unheard = ""
        self._on_unheard: Callable[[str], None] | None = None
        self._socket: socket.socket | None = None
        number = os.environ.pop(VARIABLE, "")
        if number:
            with suppress(OSError, ValueError):  # a variable that somebody else has set
                self._socket = socket.socket(fileno=int(number))
        if self._socket is not None:
            threading.Thread(target=self._listen, args=(self._socket,), name="parent", daemon=True).start()

    def tell_unheard(self, tell: Callable[[str], None]) -> None:
        """Call `tell` once the launcher cannot print any more, with the reason; at once where it is so already."""
        with self._lock:
            self._on_unheard = tell
            if self._unheard:
                tell(self._unheard)

    def begin_to_wait(self) -> None:
        """From now on this rank waits for all others."""
        with self._lock:
            self._waits = True
            self._heed()

    def joined(self) -> None:
        """All ranks have met: whoever dies from now on is missed by the watch."""
        with self._lock:
            self._joined = True
        self._tell(JOINED)

    def may_leave(self) -> None:
        """From now on ranks that die end nobody else: the others need as long as they need."""
        self._tell(MAY_LEAVE)

    def _tell(self, word: bytes) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(word)

    def _listen(self, from_parent: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := from_parent.recv(65536):
                word = word_of(data)
                with self._lock:
                    if word is not None and "unheard" in word:
                        self._hear_unheard(word["unheard"])
                        continue
                    self._word = self._word or word  # what comes later comes of it
                    self._heed()

    def _hear_unheard(self, why: str) -> None:
        first, self._unheard = not self._unheard, why
        if first and self._on_unheard is not None:
            with suppress(Exception):  # a full disk takes no line of it either
                self._on_unheard(why)

    def _heed(self) -> None:
        """End, if there is a reason to."""
        if self._word is None or self._joined or (self._word["spoke"] and not self._waits):
            return
        printed(f"broken     {self._word['sentence']}")
        os._exit(3)


def word_of(data: bytes) -> dict[str, Any] | None:
    """A launcher's word; None where it is none: the descriptor may be another's."""
    try:
        word = json.loads(data)
    except (ValueError, RecursionError):
        return None
    found = {name: type(each) for name, each in word.items()} if isinstance(word, dict) else {}
    texts = [each for each in word.values() if type(each) is str] if found in SHAPES else []
    return word if texts and not any(map(SURROGATE.search, texts)) else None


class Child:
    """The launcher's end of one rank's socket."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._told: set[bytes] = set()

    def joined(self) -> bool:
        """Whether the rank has told that it has met the others."""
        return JOINED in self._heard()

    def may_leave(self) -> bool:
        """Whether it has told that it goes on without those that die."""
        return MAY_LEAVE in self._heard()

    def _heard(self) -> set[bytes]:
        with suppress(OSError):  # nothing more is there
            while word := self._socket.recv(64):
                self._told.add(word)
        return self._told

    def tell(self, sentence: str, spoke: bool) -> None:
        """Who died, and whether that rank has said why itself."""
        with suppress(OSError):  # it has ended too
            self._socket.send(json.dumps(cut({"sentence": sentence, "spoke": spoke}, MAX_TEXT)).encode())

    def tell_unheard(self, why: str) -> None:
        """What the ranks say is printed no more, and why."""
        with suppress(OSError):
            self._socket.send(json.dumps(cut({"unheard": why}, MAX_TEXT)).encode())

    def close(self) -> None:
        self._socket.close()
