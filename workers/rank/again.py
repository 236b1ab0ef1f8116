"""A rank that is started again in a run which went on without it: it meets the others over what its mode opens.

It takes no part in what all ranks did together at the start, nor in drills, of which its life before had its own. So
its store and its default group are its own until the mode hands it those of all who are left.
"""

import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from workers.cluster.board import Member
from workers.cluster.board_socket import udp_socket
from workers.cluster.dropped import Dropped
from workers.cluster.key import key_of
from workers.cluster.opening import Opener
from workers.cluster.rendezvous import Cluster
from workers.cluster.sealed import Seal
from workers.config import Config
from workers.contract import Mode
from workers.rank.way_back import WayBack, own_ip

ALONE_S = 60.0


def rejoin(config: Config, way: WayBack, say: Callable[[str], None]) -> Cluster:
    """The run as the file has it, with this process in the place of the one that it was before."""
    ip = way.members[way.rank].ip
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    here = own_ip(way, family)
    udp = udp_socket(family, here)
    pid = Member(way.rank, socket.gethostname(), here, udp.getsockname()[1], way.members[way.rank].pid)
    way.members = way.members | {way.rank: pid}
    key, dropped = key_of(config).secret, Dropped(say)
    seal, token = Seal(key), bytes.fromhex(way.run["token"])
    opener = Opener(key, seal.sender, dropped)
    opener.know_run(token)
    say(f"back       rank {way.rank} finds its way back into {way.run['run_id']}")
    return Cluster(
        way.rank, config.world_size, dist.HashStore(), 0, way.members, udp, way.run["run_id"], token, seal, opener,
        dropped,
    )  # fmt: skip


def meet_nobody(mode: Mode) -> Mode:
    """A default group of this process alone; returns the mode on a mesh of one rank."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=ALONE_S)
    )  # fmt: skip
    return replace(mode, axes=lambda config: {"dp": 1})  # noqa: ARG005
