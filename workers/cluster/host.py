"""Rank 0 as the host: it opens the ports, keeps the board until every rank is there, and tells all what is refused."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from workers.cluster import ClusterError, name_ranks
from workers.cluster.address import Address, is_local, source_ip
from workers.cluster.arrival import FOREIGN_S, Arrival
from workers.cluster.board import Board
from workers.cluster.board_socket import OTHER_KEY, Desk, listening_socket, open_ports, own_ip, udp_socket

FROZEN_S = 1.0  # between two looks at the board, which come a hundred times a second
LINGER_S = 6.0  # how long rank 0 stays for ranks that are still importing torch, to tell them why there is no run


def open_desk(arrival: Arrival, address: Address, udp: socket.socket, guard: socket.socket | None = None) -> Desk:
    """The board of a new run, asked at `udp`; `guard` holds the TCP port beside it."""
    config = arrival.config
    run_id = config.run_id or f"{config.mode_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    ip = address.ip if is_local(address) else source_ip(address.family, address.ip) or address.ip
    board = Board(arrival.claim, ip, arrival.udp.getsockname()[1], run_id, config.join_timeout_s)
    return Desk(board, udp, arrival.key, arrival.dropped, guard)


def open_host(arrival: Arrival, address: Address) -> Desk:
    """The desk on MASTER_PORT; raises ClusterError where another program or run keeps the port."""
    port = arrival.config.master_port
    free_since = time.monotonic()
    while True:
        try:
            ports = open_ports(address, port)
        except OSError as error:
            raise ClusterError(f"MASTER_PORT={port} cannot be opened on {address.name}: {error.strerror}") from None
        if ports is not None:
            guard, udp = ports
            return open_desk(arrival, address, udp, guard)
        # The board of another run answers here too: it knows whether this RANK=0 is its double or its successor.
        if arrival.ask_once(address, port) is not None:
            free_since = time.monotonic()
        if time.monotonic() - free_since > FOREIGN_S:
            _refuse_all(arrival, address, arrival.taken(address, port))
        if arrival.expired:
            raise ClusterError(f"MASTER_PORT={port} on {address.name} was still held by an earlier run {arrival.bound}")


def _refuse_all(arrival: Arrival, address: Address, sentence: str) -> None:
    """Tell the others why rank 0 cannot open its port, by what is left of it.

    Where UDP is free they are told. Where TCP alone is free it is held, silent: ranks that find that come to the same
    sentence.
    """
    arrival.say(f"waiting for the others to know: {sentence}")
    port = arrival.config.master_port
    with ExitStack() as kept:
        udp, guard = (_if_free(kept, open_it) for open_it in (
            lambda: udp_socket(address.family, own_ip(address), port), lambda: listening_socket(address, port)
        ))  # fmt: skip
        if udp is not None:
            desk = open_desk(arrival, address, udp)
            desk.board.refusal = sentence
            desk.linger(LINGER_S)
        elif guard is not None and not arrival.meets_another_key:
            time.sleep(LINGER_S)
    raise ClusterError(sentence)


def _if_free(kept: ExitStack, open_it: Callable[[], socket.socket]) -> socket.socket | None:
    try:
        return kept.enter_context(open_it())
    except OSError:
        return None


def gather(arrival: Arrival, desk: Desk) -> None:
    """Answer until every rank is here; raises the board's refusal once the others have heard it."""
    board, lost_after_s, listened_at = desk.board, arrival.config.lost_after_s, time.monotonic()
    while board.refusal is None and (missing := board.missing(time.monotonic())):
        desk.serve()
        now = time.monotonic()
        if now - listened_at > FROZEN_S:
            board.frozen_until = now
        listened_at = now
        if silent := board.silent(now, lost_after_s):
            board.give_up(silent, lost_after_s)
        elif arrival.expired:
            board.refusal = (
                f"{name_ranks(missing)} of {board.own.world_size} did not come {arrival.bound}{_strangers(arrival)}"
            )
            desk.linger(1.0)  # the others wait already: nobody is still on the way
        arrival.progress(f"waiting for {name_ranks(missing)}")
        time.sleep(0.01)
    if board.refusal is not None:
        desk.linger(LINGER_S)
        raise ClusterError(board.refusal)


@contextmanager
def answering(desk: Desk) -> Iterator[None]:
    """Answer on a thread, while this one opens the store: those who ask would take rank 0 for lost."""
    done = threading.Event()

    def answer() -> None:
        while not done.wait(0.05):
            desk.serve()

    thread = threading.Thread(target=answer, name="desk", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _strangers(arrival: Arrival) -> str:
    """Who is not let in for want of the key, if anybody asked: the missing may be among them."""
    count = arrival.dropped.by_fault[OTHER_KEY]
    if not count:
        return ""
    source = arrival.dropped.last_source[OTHER_KEY]
    return (
        f"; {count} questions came that were {OTHER_KEY}, the last one from {source}: set the same LAB_KEY on all ranks"
    )


def seal(desk: Desk, token: str, store_port: int) -> None:
    """Fix the members, and tell those who ask; only who has the key hears where the store is."""
    desk.board.seal(token, store_port, time.monotonic())
    desk.serve()
