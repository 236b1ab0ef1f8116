"""The network link of this container, as slow as LAB_NET_RATE and LAB_NET_DELAY require.

exec python -m distlab.lab.cluster.link COMMAND   shape the link, drop the capability, and continue as COMMAND

The entry point runs this with NET_ADMIN from compose/net.yaml, as root, before the rank drops its uid. Every interface
that leads to other ranks gets a netem queue, which delays each packet, and behind it a token bucket (tbf), which limits
the rate. So a packet in the bucket has been delayed already, and each cost counts once. A file records the result: the
rank reads it to refuse an unshaped link and to report what the kernel lacks.

The rate is that of the ranks' data: packets carry 1448 bytes of it in 1514, so a bucket lets through 4.6 % more. Its
size is a millisecond's worth. With less the link would idle while the kernel wakes up to open it; with more, messages
of that size would pass without a limit. Larger packets that TCP passes in one piece (up to 64 KiB) are cut.
"""

import ctypes
import errno
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distlab.lab.config import Config, ConfigError

SHAPED = Path("/tmp/distlab-link")  # of this container alone
COMMAND = "docker compose -f docker-compose.yaml -f compose/net.yaml up"


@dataclass(frozen=True)
class Shaped:
    """The state of a rank's link: the requested variables, and a sentence for what the kernel could not do."""

    rate: str | None
    delay: str | None
    lacks: str = ""


def bits_s(rate: str) -> float:
    """Return LAB_NET_RATE in bits per second: 100mbit is 1e8."""
    return float(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]]


def seconds(delay: str) -> float:
    """Return LAB_NET_DELAY in seconds: 5ms is 0.005."""
    number = delay.rstrip("ums")
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[delay.removeprefix(number)]


def requested(config: Config) -> str:
    """Return the two variables with their values, for messages; empty if neither is set."""
    values = {"LAB_NET_RATE": config.net_rate, "LAB_NET_DELAY": config.net_delay}
    return " and ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def refusals(config: Config) -> list[str]:
    """Return a sentence if a slow link was requested and this rank has none."""
    if not requested(config) or config.world_size == 1:  # one rank sends nothing, over no link
        return []
    if config.local_rank is not None:
        return [f"{requested(config)}: local ranks have no link to shape, run them in containers: {COMMAND}"]
    if shaped(config) is None:
        return [f"{requested(config)}: this rank's link was not shaped, which needs NET_ADMIN: {COMMAND}"]
    return []


def shaped(config: Config) -> Shaped | None:
    """Return how this container's link was shaped for these settings; None if it was not."""
    if not SHAPED.exists():
        return None
    found = Shaped(**json.loads(SHAPED.read_text(encoding="utf-8")))
    return found if (found.rate, found.delay) == (config.net_rate, config.net_delay) else None


def write_shaped(done: Shaped) -> None:
    """Write for the rank how its link was shaped."""
    SHAPED.write_text(json.dumps(asdict(done)), encoding="utf-8")


BURST_S = 1e-3  # of the rate: the size of the bucket
# Share of the rate, and minimum: the queue before the bucket. TCP itself keeps it short; losses do not.
QUEUE_S, QUEUE_BYTES = 0.1, 1 << 20
DELAYED_PACKETS = 100_000  # at most, in the delay queue
MAX_BITS_S, MAX_DELAY_S = 34e9, 100.0  # tbf counts bytes per second in 32 bits, netem 64 ns in as many
HEADER_BYTES, TCP_BYTES = 14, 52  # of Ethernet, before a packet's MTU; of IP and TCP with timestamps, inside of it

IFF_UP, IFF_LOOPBACK = 1, 8  # net/if.h
CAP_NET_ADMIN = 12  # linux/capability.h
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_NO_NEW_PRIVS = 38


class LinkError(Exception):
    """The link cannot be shaped as requested; the message says why, in one sentence."""


def shape(route: Any, config: Config) -> Shaped:
    """Install the queues on all interfaces that lead out, through pyroute2's IPRoute `route`; raises LinkError."""
    rate = bits_s(config.net_rate) if config.net_rate is not None else None
    delay = seconds(config.net_delay) if config.net_delay is not None else 0.0
    if rate is not None and rate > MAX_BITS_S:
        raise LinkError(f"LAB_NET_RATE={config.net_rate} is out of range, allowed: 34gbit at most")
    if delay > MAX_DELAY_S:
        raise LinkError(f"LAB_NET_DELAY={config.net_delay} is out of range, allowed: {MAX_DELAY_S:g}s at most")
    lacks = ""
    for index, mtu in outward_interfaces(route):
        place: dict[str, Any] = {"root": True}
        if delay:
            if install(
                route, "replace", "netem", index, **place, handle="1:", delay=round(delay * 1e6), limit=DELAYED_PACKETS
            ):
                place = {"parent": "1:1"}  # the rate comes behind the delay
            else:
                lacks = f"this kernel has no netem, so LAB_NET_DELAY={config.net_delay} delays nothing here"
        if rate is not None and not install(route, "replace", "tbf", index, **place, handle="2:", **bucket(rate, mtu)):
            raise LinkError(
                f"LAB_NET_RATE={config.net_rate}: this kernel has no token bucket (CONFIG_NET_SCH_TBF), leave it unset"
            )
    return Shaped(config.net_rate, config.net_delay, lacks)


def outward_interfaces(route: Any) -> list[tuple[int, int]]:
    """Return index and MTU of each interface that is up and no loopback; raises LinkError if there is none."""
    up = [link for link in route.get_links() if link["flags"] & (IFF_UP | IFF_LOOPBACK) == IFF_UP]
    if not up:
        raise LinkError("this container has no network interface that is up, so there is no link to shape")
    return [(link["index"], link.get_attr("IFLA_MTU")) for link in up]


def bucket(rate: float, mtu: int) -> dict[str, int]:
    """Return tbf's parameters, in bytes and bytes per second, for `rate` bits per second of the ranks' data."""
    packet = mtu + HEADER_BYTES
    bytes_s = rate / 8 * packet / (mtu - TCP_BYTES)
    burst = max(round(bytes_s * BURST_S), 2 * packet)
    return {"rate": round(bytes_s), "burst": burst, "limit": burst + max(round(bytes_s * QUEUE_S), QUEUE_BYTES)}


def install(route: Any, command: str, kind: str, index: int, **parameters: Any) -> bool:
    """Install a queue; returns False if the kernel does not know its kind. Raises LinkError."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        route.tc(command, kind, index, **parameters)
    except NetlinkError as error:
        if error.code == errno.ENOENT:
            return False
        raise LinkError(f"the link cannot be shaped: the kernel refused {kind} ({os.strerror(error.code)})") from error
    return True


def drop_net_admin() -> None:
    """Drop NET_ADMIN for good: with no_new_privs, root too gets no capability back from a new program
    (capabilities(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)  # of this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of capabilities 0 to 31, then of the others
    failed = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.capget(header, sets)
    for position in range(3):
        sets[position] &= ~(1 << CAP_NET_ADMIN)
    if failed or libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "NET_ADMIN cannot be dropped")


def main() -> int:
    """Shape the link and become the command that the arguments are; returns 2 if that failed, with a sentence."""
    try:
        config = Config.read()
        if requested(config):
            from pyroute2 import IPRoute  # its import takes 0.3 s, which a rank without a slow link saves

            with IPRoute() as route:
                done = shape(route, config)
            write_shaped(done)
    except ConfigError:
        pass  # the rank prints all errors in its settings
    except (LinkError, OSError) as error:
        print(f"refused    {error}", flush=True)
        return 2
    drop_net_admin()
    return os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
