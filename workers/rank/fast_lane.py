"""The fast lane: a second group of all ranks, over a link that is link.FASTER times as fast as the one that was asked
for.

The queues before a container's link, which root set up before there was a rank, send labelled packets through a bucket
of their own (cluster/shaping.py). dist.new_group opens connections of its own, from each rank to each, so the sockets
that two ranks have after it and had not before are the group's: each rank labels what its ends of them send,
acknowledgements too. Whatever else the ranks send, over the first group or the store, keeps to the rate that was asked
for, and the two lanes take nothing from each other.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from workers.cluster import link
from workers.cluster.link import FASTER
from workers.lab import Lab
from workers.measure import sockets
from workers.measure.sockets import Connection, NoDiagnostics
from workers.rank.link_rate import measured_bits_s, message_bytes
from workers.report.units import human_bits

__all__ = ["FASTER", "fast_lane", "measure_lane"]


@contextmanager
def fast_lane(lab: Lab) -> Iterator[dist.ProcessGroup | str]:
    """A group of all ranks over the fast lane, gone after the block; or why there is none. All ranks enter and leave
    together.

    After an error inside the block the group stays, since to wait for ranks that fail would only take longer.
    """
    why = agreed(lab, "the fast lane", missing(lab))
    if why:
        yield why
        return
    before = sockets.connections()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=lab.config.collective_timeout_s))
    why = agreed(lab, "the fast lane's label", label(lab, before))  # and nobody sends before all have labelled
    yield why or group
    lab.exchange.barrier("the fast lane's end")
    dist.destroy_process_group(group)


def agreed(lab: Lab, name: str, fault: str) -> str:
    """The first fault that any rank has, on every rank; empty if none has one."""
    return next(filter(None, lab.exchange.everyone(name, fault)), "")


def missing(lab: Lab) -> str:
    """Why this rank's link has no fast lane; empty if it has one."""
    if lab.config.backend != "gloo":
        return f"the connections of {lab.config.backend} cannot be told from others"
    done = link.shaped(lab.config)
    if done is None:
        return "this rank's link was not shaped"
    try:
        sockets.connections()
    except NoDiagnostics as error:
        return str(error)
    return done.no_lane


def label(lab: Lab, before: dict[int, Connection]) -> str:
    """Label what this rank sends over connections to ranks that were not there `before`; returns why it could not."""
    new = {
        inode: each
        for inode, each in sockets.connections().items()
        if inode not in before
        and lab.config.master_port not in (each.local[1], each.remote[1])  # the store's
        and ":" not in each.remote[0]  # IPv6 has its label elsewhere, and our filter looks for IPv4's
    }
    ends = lab.exchange.everyone("the fast lane's ends", [[each.local, each.remote] for each in new.values()])
    peers = {
        ((far[0], far[1]), (near[0], near[1])): rank
        for rank, of_rank in enumerate(ends)
        for near, far in of_rank
        if rank != lab.rank
    }
    lane = {inode: peers[each.local, each.remote] for inode, each in new.items() if (each.local, each.remote) in peers}
    reached = {lane[inode] for inode in labelled(set(lane))}
    if len(reached) == lab.world_size - 1:
        return ""
    return f"rank {lab.rank} could label its IPv4 connections to {len(reached)} of {lab.world_size - 1} other ranks"


def labelled(inodes: set[int]) -> Iterator[int]:
    """Label what this process's sockets with these inodes send, by its own right; gives those that it labelled."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as the descriptor of the listing itself
            if os.stat(f"/proc/self/fd/{name}").st_ino not in inodes:
                continue
            # Nobody else closes a duplicate, nor gives its number to another.
            with socket.socket(fileno=os.dup(int(name))) as copy:
                inode = os.fstat(copy.fileno()).st_ino
                if inode in inodes:
                    copy.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, link.LABEL)
                    yield inode


def measure_lane(lab: Lab, group: dist.ProcessGroup) -> str:
    """Hold the fast lane's rate against what was asked for, over its group; returns both as words."""
    assert lab.config.net_rate is not None, "there is a lane where a rate was asked for"
    asked = FASTER * link.bits_s(lab.config.net_rate)
    seen = measured_bits_s(lab, group, message_bytes(asked))
    lab.compare("fast lane rate", asked, seen, "bit/s", formula=f"{FASTER} x LAB_NET_RATE", shown="a time")
    everyone = lab.exchange.everyone("the fast lane's rate", seen)
    return f"{human_bits(asked)} asked for, {human_bits(min(everyone))} to {human_bits(max(everyone))} measured a rank"
