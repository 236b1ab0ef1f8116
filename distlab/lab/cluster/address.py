"""Resolve MASTER_ADDR, find the local address and interface that lead to it, and open sockets there.

Every call has a time limit: a resolver without an answer can block for half a minute, so it runs on its own thread.
"""

import ipaddress
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from distlab.lab.cluster import ClusterError

Result = TypeVar("Result")
REPORT_AFTER_S = 3.0  # Compose registers a container's name when it starts it, within about 2 s; a pod's comes later
RETRY_S = 0.25
SIOCGIFADDR = 0x8915
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Address(NamedTuple):
    """A host as socket calls need it: its name for messages, its address family and its numeric address."""

    name: str
    family: socket.AddressFamily
    ip: str


def bounded(call: Callable[[], Result], timeout_s: float, refusal: str) -> Result:
    """Return `call()`, or raise ClusterError(refusal) after `timeout_s`; errors of `call` are raised here."""
    answers: queue.SimpleQueue[tuple[bool, Result | BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:
            answers.put((False, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        succeeded, value = answers.get(timeout=max(timeout_s, 0.01))
    except queue.Empty:
        raise ClusterError(refusal) from None
    if not succeeded:
        raise value  # type: ignore[misc]
    return value  # type: ignore[return-value]


def resolve(name: str, timeout_s: float, say: Callable[[str], None]) -> Address:
    """Return the address of `name`, IPv4 first; print every REPORT_AFTER_S that there is none yet.

    Raises ClusterError if the name stays unknown for `timeout_s` seconds, and at once if no host can have it.
    """
    deadline = time.monotonic() + timeout_s
    refusal = (
        f"MASTER_ADDR={name!r} does not resolve to an address ({timeout_s:g} s tried): set it to the host of rank 0"
    )
    report_at = time.monotonic() + REPORT_AFTER_S
    while (now := time.monotonic()) < deadline:
        try:
            found = bounded(
                lambda: socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM), min(REPORT_AFTER_S, deadline - now), ""
            )
        except UnicodeError:  # a label that a host name cannot contain
            break
        except (OSError, ClusterError):
            if time.monotonic() >= report_at:
                say(f"waiting for MASTER_ADDR={name!r}, which does not resolve to an address yet")
                report_at += REPORT_AFTER_S
            time.sleep(RETRY_S)
            continue
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return Address(name, family, str(address[0]))
    raise ClusterError(refusal)


def is_local(address: Address) -> bool:
    """Return whether `address` belongs to this machine: only then can a socket be bound to it."""
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.ip, 0))
        except OSError:
            return False
    return True


def source_ip(family: int, target_ip: str) -> str | None:
    """Return this machine's address on the way to `target_ip`, or None without a route; sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target_ip, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def outward_ip(family: int) -> str:
    """Return this machine's address on its default route, or "" if it has none (RFC 5737 and 3849 addresses are
    assigned to no host)."""
    return source_ip(family, "192.0.2.1" if family == socket.AF_INET else "2001:db8::1") or ""


def is_loopback(ip: str) -> bool:
    """Return whether `ip` reaches this machine only, such as the 127.0.1.1 that Debian assigns to a host's own name."""
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def interface_of(ip: str) -> str | None:
    """Return the network interface with an IPv4 address, such as `eth0`; None if the system does not report it."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return "lo" if is_loopback(ip) else None  # 127.0.1.1 is no interface's first address


def listening_socket(address: Address, port: int = 0) -> socket.socket:
    """Return a listening TCP socket; raises OSError if the port is taken.

    It listens at the address that `own_ip` returns.
    """
    tcp = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past the TIME_WAIT of an earlier run
        tcp.bind((own_ip(address), port))
        tcp.listen(128)
    except OSError:
        tcp.close()
        raise
    return tcp


def own_ip(address: Address) -> str:
    """Return where rank 0 opens its ports: at its own address only.

    If that one is a loopback under another name, as on Debian, rank 0 uses all: other hosts know it by another.
    """
    return address.ip if address.name in LOOPBACK_NAMES or not is_loopback(address.ip) else ""
