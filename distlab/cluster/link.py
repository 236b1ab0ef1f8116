"""The link: this container's way out, as slow as LAB_NET_RATE and LAB_NET_DELAY ask for; what was asked, refused and
done.

Where compose/net.yaml gave NET_ADMIN, shaping.py puts the kernel's queues before it, as root and before the rank drops
its uid. What was done is written to a file, which the rank reads: to refuse a link that nobody shaped, and to say what
the kernel lacks.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from distlab.config import Config

SHAPED = Path("/tmp/distlab-link")  # of this container alone
COMMAND = "docker compose -f docker-compose.yaml -f compose/net.yaml up"


@dataclass(frozen=True)
class Shaped:
    """What the rank is told of its link: what was asked for, and a sentence for what the kernel could not do."""

    rate: str | None
    delay: str | None
    lacks: str = ""


def bits_s(rate: str) -> float:
    """LAB_NET_RATE in bits a second: 100mbit is 1e8."""
    return float(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]]


def seconds(delay: str) -> float:
    """LAB_NET_DELAY in seconds: 5ms is 0.005."""
    number = delay.rstrip("ums")
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[delay.removeprefix(number)]


def asked(config: Config) -> str:
    """The variables as they were set, for sentences; empty if neither was."""
    values = {"LAB_NET_RATE": config.net_rate, "LAB_NET_DELAY": config.net_delay}
    return " and ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def refusals(config: Config) -> list[str]:
    """A sentence if a slow link was asked for and this rank has none."""
    if not asked(config) or config.world_size == 1:  # one rank sends nothing, over no link
        return []
    if config.local_rank is not None:
        return [f"{asked(config)}: local ranks have no link to shape, run them in containers: {COMMAND}"]
    if shaped(config) is None:
        return [f"{asked(config)} and this rank's link was not shaped, which takes a capability more: {COMMAND}"]
    return []


def shaped(config: Config) -> Shaped | None:
    """What was done to this container's link for these settings; None if nothing was."""
    if not SHAPED.exists():
        return None
    found = Shaped(**json.loads(SHAPED.read_text(encoding="utf-8")))
    return found if (found.rate, found.delay) == (config.net_rate, config.net_delay) else None


def tell_rank(done: Shaped) -> None:
    """Tell the rank what was done."""
    SHAPED.write_text(json.dumps(asdict(done)), encoding="utf-8")
