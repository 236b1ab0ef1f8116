"""Rank 0 as the host: it opens the ports, keeps the board until every rank is there, and tells all what is refused."""

import secrets
import socket
import time

from workers.cluster import ClusterError, name_ranks
from workers.cluster.address import Address, is_local, source_ip
from workers.cluster.arrival import FOREIGN_S, Arrival, taken
from workers.cluster.board import Board
from workers.cluster.board_socket import Desk, open_ports, udp_socket

LINGER_S = 6.0  # how long rank 0 stays for ranks that are still importing torch, to tell them why there is no run


def open_desk(arrival: Arrival, address: Address, udp: socket.socket) -> Desk:
    """The board of a new run, asked at `udp`."""
    config = arrival.config
    run_id = config.run_id or f"{config.mode_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    own_ip = address.ip if is_local(address) else source_ip(address.family, address.ip) or address.ip
    return Desk(Board(arrival.claim, own_ip, arrival.udp.getsockname()[1], run_id, config.join_timeout_s), udp)


def open_host(arrival: Arrival, address: Address) -> tuple[socket.socket, Desk]:
    """The store's listening socket and the desk; raises ClusterError where another program or run keeps the port."""
    port = arrival.config.master_port
    free_since = time.monotonic()
    while True:
        try:
            ports = open_ports(address, port)
        except OSError as error:
            raise ClusterError(f"MASTER_PORT={port} cannot be opened on {address.name}: {error.strerror}") from None
        if ports is not None:
            return ports[0], open_desk(arrival, address, ports[1])
        # The board of another run answers here too: it knows whether this RANK=0 is its double or its successor.
        if arrival.ask_once(address, port) is not None:
            free_since = time.monotonic()
        if time.monotonic() - free_since > FOREIGN_S:
            _refuse_all(arrival, address, taken(address, port))
        if arrival.expired:
            raise ClusterError(f"MASTER_PORT={port} on {address.name} was still held by an earlier run {arrival.bound}")


def _refuse_all(arrival: Arrival, address: Address, sentence: str) -> None:
    """Tell the others, at the UDP port of the same number if that one is free, why rank 0 cannot open its store."""
    try:
        desk = open_desk(arrival, address, udp_socket(address.family, "", arrival.config.master_port))
    except OSError:
        raise ClusterError(sentence) from None
    desk.board.refusal = sentence
    desk.linger(LINGER_S)
    raise ClusterError(sentence)


def gather(arrival: Arrival, desk: Desk) -> None:
    """Answer until every rank is here; raises the board's refusal once the others have heard it."""
    board = desk.board
    while board.refusal is None and (missing := board.missing(time.monotonic())):
        desk.serve()
        if arrival.expired:
            board.refusal = f"{name_ranks(missing)} of {board.own.world_size} did not come {arrival.bound}"
            desk.linger(1.0)  # the others wait already: nobody is still on the way
        arrival.progress(f"waiting for {name_ranks(missing)}")
        time.sleep(0.01)
    if board.refusal is not None:
        desk.linger(LINGER_S)
        raise ClusterError(board.refusal)


def seal(desk: Desk) -> None:
    """Fix the members, and tell those who ask."""
    desk.board.seal(secrets.token_hex(8), time.monotonic())
    desk.serve()
