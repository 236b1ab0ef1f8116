"""Faults that a rank injects into itself, each by a mechanism that takes no privilege: LAB_FAULTS says which and when
(distlab/lab/config/fault_spec.py), distlab/lab/rank/fault_injection.py calls them and compares what happens with what
should.

The kernel kills, stops or slows the process; it drops what arrives at its sockets, or lets out little; the disk is
full, or a byte of a checkpoint changes; one bit of a tensor, or of one on its way to another rank, flips.
"""

import ctypes
import os
import random
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.lab.measure.traffic import BELOW, HERE, SHAPES, Shape

# One bit of one number of a tensor flips, as in a memory or a processor that is going bad (Dixit et al. 2021, "Silent
# Data Corruptions at Scale").
#
#     sign       the highest bit
#     exponent   the 8 after it (11 in float64, 5 in float16): the number is 2^1 to 2^128 times as large, or as small
#     highest    of the exponent: what is below 2 becomes 2^128 times as large
#     mantissa   the 3 highest of the rest: by a 2nd, a 4th or an 8th of its power of two

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EXPONENT_BITS = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8, torch.float64: 11}
HIGH = 3  # bits of the mantissa
HIGHEST = "highest"
PACKED_BIT = 6


@dataclass(frozen=True)
class Flip:
    """What was done: bit `bit`, counted from the lowest, of element `index` of the flattened tensor."""

    index: int
    bit: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"[{self.index}] bit {self.bit}: {self.before:g} became {self.after:g}"


def bits_of(dtype: torch.dtype, kind: str) -> range:
    """The bits that count as sign, exponent, its highest, or (the three highest of the) mantissa."""
    sign = 8 * dtype.itemsize - 1
    exponent = sign - EXPONENT_BITS[dtype]
    return {
        "sign": range(sign, sign + 1),
        "exponent": range(exponent, sign),
        HIGHEST: range(sign - 1, sign),
        "mantissa": range(exponent - HIGH, exponent),
    }[kind]


@torch.no_grad()
def flip(tensor: Tensor, kind: str, draw: random.Random) -> Flip:
    """Flip one bit in place; of the numbers that are not small beside the others, so that it can matter.

    Of packed bytes it is the second bit of the last one: of a float that stands there the highest of its exponent.
    """
    flat = tensor.detach().reshape(-1)
    assert flat.data_ptr() == tensor.data_ptr(), "a view of the tensor, or its copy would be changed"
    if flat.dtype == torch.uint8:
        before = flat[-1].item()
        flat[-1] ^= 1 << PACKED_BIT
        return Flip(len(flat) - 1, PACKED_BIT, before, flat[-1].item())
    large = (flat.abs() >= flat.abs().mean()).nonzero()
    index = int(large[draw.randrange(len(large))]) if len(large) else draw.randrange(len(flat))
    bit = draw.choice(bits_of(tensor.dtype, kind))
    before = flat[index].item()
    word = flat[index : index + 1].view(WORDS[tensor.dtype.itemsize])
    width = 8 * tensor.dtype.itemsize
    mask = 1 << bit if bit < width - 1 else -(1 << bit)  # the sign's word is the negative one
    word.bitwise_xor_(mask)
    return Flip(index, bit, before, flat[index].item())


# A disk that is full, and a checkpoint in which a byte changes after it was written.
#
# The full disk is Linux's /dev/full, on which every write fails as on a disk without room: it takes the place of this
# rank's log and records, so no other process meets it. A damaged checkpoint is one bit of one of its files.

FULL = Path("/dev/full")


def fill(descriptors: list[int]) -> None:
    """From now on each write to these open files meets a disk that is full; raises OSError on a system without
    /dev/full."""
    full = os.open(FULL, os.O_WRONLY | os.O_APPEND)
    try:
        for each in descriptors:
            os.dup2(full, each)
    finally:
        os.close(full)


def damage(checkpoint: Path, files: list[str], draw: random.Random) -> str:
    """Flip one bit of one of the checkpoint's `files`; returns the name of the file."""
    name = draw.choice(sorted(files))
    path = checkpoint / name
    place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
    return name


# Links that break or get slow, of this rank's own sockets and by the kernel, with no privilege.
#
# A socket has a filter (socket(7), SO_ATTACH_FILTER) that decides which packets arrive: one that drops all of them
# cuts it off, in TCP with every acknowledgement, so that the other end sends again and again into nothing. And it has
# a pace (SO_MAX_PACING_RATE), above which it sends no data. Since Linux 6.15 a filter of TCP takes NET_ADMIN; without
# it a cut drops heartbeats alone, and if it is for good the rank's connections send nothing. Delays, and rates of a
# whole container, are compose/net.yaml's.
#
#     in     this rank hears nobody: all its sockets drop what comes
#     out    nobody hears it: it sends no heartbeats, and its connections send next to nothing
#     both   it hears nobody, and sends no heartbeats; of its tensors leaves what needs no acknowledgement

SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MAX_PACING_RATE = 26, 27, 47
NOTHING_S, UNBOUND = 1, 0xFFFFFFFF  # bytes a second
# Instructions of a packet filter (linux/bpf_common.h): operation, steps if true, steps if false, number.
RETURN, DROP = 0x06, 0
ALL = [(RETURN, 0, 0, DROP)]

Instructions = list[tuple[int, int, int, int]]


def hear_nobody(but: socket.socket | None = None) -> bool:
    """Drop all that comes to this process from other ranks, `but` on one connection, until `hear_again`; False where
    this kernel does not let it."""
    refused = []

    def drop(each: socket.socket) -> None:
        if but is not None and each.getsockname() == but.getsockname():
            return
        try:
            attach(each, ALL)
        except PermissionError:
            refused.append(each.type)

    _each(drop)
    return not refused


def hear_again() -> None:
    """Take the filters away; TCP sends again what was dropped."""
    _each(_detach)


def send_nothing() -> None:
    """Let this process's connections send a byte a second; for good, since a packet that waits so long waits on."""
    set_pace(NOTHING_S)


def set_pace(bytes_s: int) -> None:
    """The most that each connection of this process sends in a second."""
    _each(lambda each: each.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", min(bytes_s, UNBOUND))))


def attach(each: socket.socket, instructions: Instructions) -> None:
    """Give a socket a filter in the place of the one that it has; raises OSError where the system has none."""
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    held = ctypes.create_string_buffer(program)
    each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(instructions), ctypes.addressof(held)))


def _detach(each: socket.socket) -> None:
    with suppress(FileNotFoundError, PermissionError):  # one that came later has none, nor has one that got none
        each.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def _each(act: Callable[[socket.socket], None]) -> None:
    """Do it to all connections of this process to another one."""
    for each in _own():
        act(each)


def _own() -> Iterator[socket.socket]:
    near = {each.getsockname()[:2] for each in _connections()}
    for each in _connections():
        if each.getpeername()[:2] not in near:  # else both ends are here: rank 0's line to its own server
            yield each


def _connections() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _again(int(name)) as found:  # a file, or the listing itself, closed by now
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                yield found


@contextmanager
def _again(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor, through another one, which is closed again; raises OSError where it is none."""
    again = os.dup(descriptor)
    try:
        found = socket.socket(fileno=again)
    except OSError:
        os.close(again)
        raise
    with found:
        yield found


# One bit of a message flips, behind the checksum of TCP: in a card's or a switch's memory.
#
# Of a collective it is a bit of what this rank receives from others, of a send one of what it sends: what others
# hold, or this rank itself, stays as it is. A kernel stands before each of c10d's operations, as where they are
# recorded (distlab/lab/measure/traffic.py); all steps make the same calls, so a step before tells how many there are.

SEND, GATHER = "send", "all_gather"
WITH_NUMBERS = (SEND, GATHER, "all_reduce", "reduce_scatter", "all_to_all")
Change = Callable[[str, Tensor], None]  # (operation, the numbers of it), in place


class Messages:
    """Counts this rank's messages from now on; `change` gets the one of that number, from 1. `close` ends it."""

    def __init__(self, number: int = 0, change: Change | None = None) -> None:
        self.number, self.change = number, change
        self.count = 0
        self._library = torch.library.Library("c10d", "IMPL")
        for name, shape in SHAPES.items():
            if shape.op in WITH_NUMBERS:
                pass_on = getattr(torch.ops.c10d, name).default.redispatch
                self._library.impl(name, self._kernel(shape, pass_on), HERE.name, with_keyset=True)

    def close(self) -> None:
        """Pass all messages on unseen again."""
        self._library._destroy()

    def _kernel(self, shape: Shape, pass_on: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any) -> Any:
            held = [each for each in tensors(args[0]) if has_numbers(each)]
            self.count += bool(held)
            if not held or self.change is None or self.count != self.number:
                return pass_on(keys & BELOW, *args)
            if shape.op == SEND:
                sent = [each.clone() for each in held]
                self.change(shape.op, sent[0])
                return pass_on(keys & BELOW, sent, *args[1:])
            result = pass_on(keys & BELOW, *args)
            dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
            group = dist.ProcessGroup.unbox(args[shape.group])
            self.change(shape.op, received(shape.op, held, group.rank(), group.size()))
            return result

        return kernel


def flipping(kind: str, draw: random.Random, told: Callable[[str, Flip], None]) -> Change:
    """Flip one bit of a message, and say which."""
    return lambda op, numbers: told(op, flip(numbers, kind, draw))


def received(op: str, held: list[Tensor], rank: int, size: int) -> Tensor:
    """Of a collective's result what came from another rank: of all_gather a part that is not this rank's own."""
    if op != GATHER:
        return held[0]
    parts = held if len(held) > 1 else list(held[0].view(-1).chunk(size))
    return parts[(rank + 1) % len(parts)]


def has_numbers(tensor: Tensor) -> bool:
    """Floats, or bytes into which they were packed; counts and places are none."""
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.dtype == torch.uint8)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of an operation's argument, which is one, or lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


# A rank's process is killed, stands still for a while, or gets less of its core: all by the kernel.
#
# The rank is stopped by SIGSTOP, which no thread of it sees. A process that stands still cannot wake itself: a small
# shell beside it does, and sleeps until then.

TURN_S = 0.1  # in which a slow rank runs for its share, and stands still for the rest: no heartbeat is late by it
WAKE = 'sleep "$1"; kill -CONT "$0"'
SLOW = 'while kill -STOP "$0" 2>/dev/null && sleep "$1" && kill -CONT "$0"; do sleep "$2"; done'


def kill() -> None:
    """End this process as the kernel does where memory is short: at once, and nothing of it says a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def pause(duration_s: float) -> None:
    """Stand still, all threads of this process."""
    _beside(WAKE, duration_s)
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_down(share: float) -> None:
    """From now on run for `share` of the time: what a neighbour does that takes the rest of the core."""
    _beside(SLOW, TURN_S * (1 - share), TURN_S * share)


def _beside(script: str, *seconds: float) -> None:
    subprocess.Popen(
        ["sh", "-c", script, str(os.getpid()), *(f"{each:.3f}" for each in seconds)], cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
