"""Communication: every primitive forward and backward, and the cost of an all_reduce by each algorithm.

A collective is a function of tensors on several ranks, so it has a backward pass too; which one is right depends on
which ranks have the loss. Its cost is a latency per round, and the bytes on the busiest link. The algorithms of
distlab/techniques/collectives give every rank the same sum and differ only in this cost.

  predicted   S = bytes of the tensor, N = ranks; bytes sent by a rank in an all_reduce
              ring, direct   2(N-1)/N·S  under 2·S for every N, in 2(N-1) rounds (ring) or 2 (direct; 1 for N = 2)
              tree           2(N-1)/N·S  in 2·log2 N rounds; 2·S more if N is no power of two. This is Rabenseifner's
                             algorithm; NCCL uses the name for another one: two binary trees
              server         (N-1)·S on rank 0, which grows with N: the limit of a parameter server
              gloo           2(N-1)/N·S, and for its reduce_scatter twice the minimum
              tcp            like server up to 512 KiB, like direct above; without a library's threads
  shapes      x [2], rows [N, 2] for the primitives; [S/4] float32 in the sweep
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.contract import Mode, Variant, untrained
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import PYTORCHS, Prediction
from distlab.lab.verify.records import compare_bytes, draw, note_messages
from distlab.techniques.collectives import ring as ring_by_hand
from distlab.techniques.collectives.by_hand import ALGORITHMS, Algorithm, Collective
from distlab.techniques.collectives.costs import all_reduce_bytes
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Addressed, Message, Peers, Pending, Steps, split
from distlab.techniques.transport.process_group import TcpBackend

from . import benchmark, lesson, primitives
from .bugs import mistake
from .checks import claims
from .options import Options
from .primitives import Convention, as_it_is

PREDICTED_BYTES = 4 << 20
GLOO, TCP = "gloo", "tcp"


def one_by_one(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """An all_reduce of sends and receives: all to rank 0, which adds one after the other, and then the sum to each.

    Correct, but slow twice: 2(N-1) messages wait for each other, and all pass the one link of rank 0. `server` has the
    same messages in parallel; in `direct`, `tree` and `ring` every rank adds a chunk.
    """
    if group.rank() == 0:
        arriving = torch.empty_like(tensor)
        for rank in range(1, group.size()):
            dist.recv(arriving, group=group, group_src=rank)
            tensor += arriving
        for rank in range(1, group.size()):
            dist.send(tensor, group=group, group_dst=rank)
    else:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)


class LessonRing:
    """The lesson's ring as an algorithm: it waits for each message itself, so no steps are left."""

    def all_reduce(self, peers: Peers, tensor: Tensor, /) -> Steps:
        lesson.all_reduce(tensor, peers.group)
        yield from ()

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor, /) -> Steps:
        output.copy_(lesson.reduce_scatter(split(tensor, peers.world_size), peers.group).view_as(output))
        yield from ()

    def all_gather(self, peers: Peers, tensor: Tensor, /) -> Steps:
        lesson.all_gather(split(tensor, peers.world_size), peers.group)
        yield from ()


def compare_sums(lab: Lab, collectives: Mapping[str, Collective]) -> None:
    """Run all variants and an all_reduce of single sends and receives on the numbers of the ring."""
    algorithms_by_name: dict[str, Callable[[Tensor], object]] = {
        "one_by_one": lambda tensor: one_by_one(tensor, lab.group)
    }
    algorithms_by_name |= {name: collective.all_reduce for name, collective in collectives.items()}
    rows = []
    for name, all_reduce in algorithms_by_name.items():
        lab.at(0, f"the sum by {name}")
        tensor, wanted = digit_tensor(lab)
        all_reduce(tensor)
        chunks_now = digits(split(tensor, lab.world_size))
        lab.check("sum", float((tensor - wanted).abs().max()), 0.0, name, f"{chunks_now} at the end")
        rows.append([name, chunks_now])
    title = "One all_reduce by every algorithm: rank r's chunk c is (c+1)·10^r"
    lab.table(title, ["by", "the result on rank 0, chunk by chunk"], rows)


# Two small programs with every number shown: the lesson's broadcast, slice and gather, and a ring all_reduce.
#
# The demo slices with `tensor_split`: the lesson's `len // N` loses the remainder if N does not divide 4, and gives
# ranks beyond 4 nothing. The ring is the variant's own (distlab/techniques/collectives/ring.py): the digits of its
# numbers show the chunk and the ranks whose parts are in the sum.


def broadcast_slice_gather(lab: Lab) -> None:
    """Send rank 0's four numbers to all; each rank works on its slice, and everyone gathers all results."""
    lab.at(0, "demo")
    # The lesson draws the first number; its printed run drew 37, which is what the default seed of 1 gives here.
    full_data = torch.arange(4) + 36 + lab.config.seed if lab.rank == 0 else torch.zeros(4, dtype=torch.long)
    full_data = full_data.to(lab.device)
    dist.broadcast(full_data, group=lab.group, group_src=0)
    slices = split(full_data.float(), lab.world_size)
    local_result = slices[lab.rank] * (lab.rank + 1)
    full_result = torch.empty(4, device=lab.device)
    Collective(lab.group).all_gather(full_result, local_result)
    lab.note("broadcast", f"rank {lab.rank} full data: {full_data.tolist()}")
    lab.note("gets", f"rank {lab.rank} received data: {slices[lab.rank].tolist()}")
    lab.note("computes", f"rank {lab.rank} local result: {local_result.tolist()}, shape {list(local_result.shape)}")
    lab.note("gathers", f"rank {lab.rank} final gathered result: {full_result.tolist()}")
    numbers = torch.arange(4) + 36 + lab.config.seed
    wanted = torch.cat([part * (rank + 1) for rank, part in enumerate(split(numbers, lab.world_size))])
    wrong = float((full_result.cpu() - wanted).abs().max())
    lab.check("demo", wrong, 0.0, detail=f"gathered {full_result.tolist()}")


class RecordingPeers(Peers):
    """Peers that record the messages of each round: (receiver, first number sent)."""

    def __init__(self, group: dist.ProcessGroup, chunks: list[Tensor]) -> None:
        super().__init__(group)
        self.chunks, self.sent, self.chunks_by_round = chunks, list[tuple[int, int]](), list[str]()

    def post(self, tag: int, receives: Addressed = (), sends: Addressed = ()) -> tuple[list[Message], list[Message]]:
        """Record the chunks, which still have the previous round's result, then post as `Peers.post`."""
        sends = list(sends)
        self.chunks_by_round.append(digits(self.chunks))
        self.sent += [(peer, int(tensor[0])) for peer, tensor in sends]
        return super().post(tag, receives, sends)


def digit_tensor(lab: Lab) -> tuple[Tensor, Tensor]:
    """Return 2N + 1 numbers and their sum. In chunk c rank r has (c+1)·10^r: the digit identifies the chunk, its places
    the ranks whose parts are in it."""
    ranks, digit = range(lab.world_size), torch.empty(2 * lab.world_size + 1, dtype=torch.long, device=lab.device)
    for number, chunk in enumerate(split(digit, lab.world_size), 1):
        chunk.fill_(number)
    return digit * 10**lab.rank, digit * sum(10**rank for rank in ranks)


def ring(lab: Lab, algorithm: Algorithm = ring_by_hand) -> None:
    """Run the ring all_reduce of the variant `ring` and log it round by round."""
    tensor, wanted = digit_tensor(lab)
    chunks = split(tensor, lab.world_size)
    peers = RecordingPeers(lab.group, chunks)
    lab.at(0, "ring")
    Pending(algorithm.all_reduce(peers, tensor)).wait()
    chunks_by_round = [*peers.chunks_by_round, digits(chunks)]
    moves_by_rank = lab.exchange.everyone("ring", peers.sent)
    rows: list[list[object]] = [["", "", "", chunks_by_round[0]]]
    finished = set(wanted.tolist())
    for number, moves in enumerate(zip(*moves_by_rank, strict=True), 1):
        sends = ", ".join(f"{sender} -> {receiver}: {value}" for sender, (receiver, value) in enumerate(moves))
        rows.append([number, "copy" if copies(moves, finished) else "add", sends, chunks_by_round[number]])
    note_ring(lab, moves_by_rank, chunks_by_round, finished)
    columns = ["round", "receivers", "sender -> receiver: value", "chunks of rank 0 afterwards"]
    lab.table(
        "A ring all_reduce, round by round: the digit is the chunk, its decimal places are the ranks", columns, rows
    )
    lab.check("ring", float((tensor - wanted).abs().max()), 0.0, detail=f"{digits(chunks)} at the end")


def copies(moves: Iterable[tuple[int, int]], finished: set[int]) -> bool:
    """Return whether a round passes complete sums, which their receivers copy."""
    return {value for _, value in moves} <= finished


def note_ring(
    lab: Lab, moves_by_rank: Sequence[Sequence[tuple[int, int]]], chunks_by_round: Sequence[str], finished: set[int]
) -> None:
    """Log on each rank what it sends and receives in each round, and its numbers after it."""
    ranks, me = lab.world_size, lab.rank
    if ranks == 1:
        return
    lab.note("RING", f"all_reduce of {ranks} chunks: {ranks - 1} rounds add, {ranks - 1} copy; I send to rank"
             f" {(me + 1) % ranks}, I receive from rank {(me - 1) % ranks}")  # fmt: skip
    lab.note(
        "",
        f"my numbers are {chunks_by_round[0]}: the first digit is the chunk, the decimal places are the ranks in a sum",
    )
    before = (me - 1) % ranks
    for number, (mine, previous) in enumerate(zip(moves_by_rank[me], moves_by_rank[before], strict=True)):
        sent, received = mine[1], previous[1]
        own = int(str(received)[0]) * 10**me
        last = copies([moves[number] for moves in moves_by_rank], finished)
        action = f"copy {number - ranks + 2}" if last else f"add {number + 1}"
        result = f"I have {chunks_by_round[number + 1]}" if last else f"{received} + my {own} = {received + own}"
        lab.note(
            action,
            f"I send chunk {chunk_of(sent)}, {sent} · I receive chunk {chunk_of(received)}, {received} · {result}",
        )


def chunk_of(value: int) -> int:
    """Return the chunk of a number from `digit_tensor`."""
    return int(str(value)[0]) - 1


def digits(chunks: list[Tensor]) -> str:
    """Return the first number of each chunk."""
    return " ".join(str(int(chunk[0])) for chunk in chunks)


# --- the run ---


def title(config: Config) -> str:
    """Return the title of the run."""
    algorithms = MODE.requested(config.variant).names
    return f"{len(primitives.PRIMITIVES)} primitives, {len(algorithms)} algorithms for an all_reduce"


def predict(config: Config) -> list[Prediction]:
    """Return the bytes of an all_reduce of 4 MiB with each algorithm."""
    ranks = config.world_size
    return [
        Prediction(
            name, "wire bytes all_reduce 4 MiB", "B", benchmark.formula("all_reduce", name),
            tuple(all_reduce_bytes(benchmark.algorithm(name), ranks, PREDICTED_BYTES, rank) for rank in range(ranks)),
            1, shown=PYTORCHS if name in MODE.by_torch else "",
        )
        for name in MODE.names
    ]  # fmt: skip


def run(
    lab: Lab, algorithms: Mapping[str, Algorithm] = ALGORITHMS, backward_of: Convention = as_it_is
) -> None:  # fmt: skip
    """Run the lesson, from one message to the cost of the largest tensor."""
    for prediction in lab.mode.all_predictions(predict(lab.config)):
        lab.say(
            f"{prediction.variant}: {prediction.formula} = {max(prediction.value) / 1e6:.3g} MB for an all_reduce of"
            " 4 MiB",
            "predict",
        )
    primitives.forward(lab)
    primitives.backward(lab, backward_of)
    lab.finished("proof")
    broadcast_slice_gather(lab)
    with gloo_and_tcp_groups(lab) as groups:
        compare(lab, algorithms, groups)


def compare(lab: Lab, algorithms: Mapping[str, Algorithm], groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Compare the variants: their results, the ring message by message, a picture, and the sweep."""
    every_algorithm = {**algorithms, "plain": LessonRing()}
    collectives = {
        name: Collective(groups.get(name, lab.group), "backend" if name in groups else name, every_algorithm)
        for name in lab.mode.names
        if lab.wants(name) and (name in groups or name not in (GLOO, TCP))
    }
    compare_sums(lab, collectives)
    ring(lab, algorithms["ring"])
    draw_all(lab, collectives)
    benchmark.run(lab, collectives, int(lab.config.own(Options).sweep_mib * benchmark.MIB))


@contextmanager
def gloo_and_tcp_groups(lab: Lab) -> Iterator[dict[str, dist.ProcessGroup]]:
    """Yield all ranks as a gloo group (or LAB_BACKEND's) and as one over plain TCP: one of them is the world, the other
    exists during the block."""
    world = TCP if lab.config.backend == TCP else GLOO
    other = GLOO if world == TCP else TCP
    groups = {world: lab.group} if lab.wants(world) else {}
    if other == TCP and lab.device.type == "cuda" and lab.wants(TCP):
        lab.skip(TCP, "plain TCP sends only from CPU memory")
    elif lab.wants(other):
        TcpBackend(lab.hooks.own_ip, lab.hooks.secret, lab.hooks.on_rejected).register()
        bound = timedelta(seconds=lab.config.collective_timeout_s)
        groups[other] = dist.new_group(dist.get_process_group_ranks(lab.group), bound, other)
    try:
        yield groups
    finally:
        if other in groups:
            dist.destroy_process_group(groups[other])


def draw_all(lab: Lab, collectives: Mapping[str, Collective]) -> None:
    """Record one all_reduce of 4 MiB by each variant, message by message, for the picture; its bytes as predicted."""
    tensor = torch.ones(PREDICTED_BYTES // 4, device=lab.device)

    def prepared(collective: Collective, number: int) -> Callable[[], object]:  # noqa: ARG001  all are alike
        def summed() -> None:
            with phase("all_reduce"):
                collective.all_reduce(tensor)

        return summed

    drawn = draw(lab, {name: partial(prepared, collective) for name, collective in collectives.items()})
    note_messages(lab, {each.variant: each.value[lab.rank] for each in predict(lab.config)})
    for prediction in predict(lab.config):
        if prediction.variant in drawn:
            name, predicted = prediction.variant, prediction.value[lab.rank]
            compare_bytes(lab, name, predicted, drawn[name].nbytes, prediction.formula)


def refuse(config: Config) -> list[str]:
    """Return errors for user models, and for messages that gloo cannot send."""
    why = "LAB_BACKEND=gloo cannot send GPU tensors, and comm is made of sends"
    return untrained(config) + [f"{why}: set LAB_BACKEND=nccl, or leave LAB_DEVICE=cpu"] * config.gloo_on_gpus


MODE = Mode(
    options=Options,
    variants=(
        Variant("gloo", by_torch=True),
        Variant("ring"),  # each chunk around the ring: distlab/techniques/collectives/ring.py
        Variant("direct"),  # all to all at once: direct.py
        Variant("tree"),  # Rabenseifner's: halves, quarters, ... and back, not NCCL's tree: tree.py
        Variant("server"),  # through rank 0: rooted.py
        Variant(TCP),  # without a library: tcp.py, rooted.py, direct.py
        Variant("plain", by_name=True),  # the ring once more, on one page: lesson.py
    ),
    run=run,
    claims=lambda mode, config: claims(mode, config.own(Options).sweep_mib),
    title=title,
    predict=predict,
    refuse=refuse,
    mistakes=mistake,
    gone={
        "stale_chunk": "LAB_BUG=lost_own_part fails the same check",
        "lost_fold": "LAB_BUG=lost_own_part fails the same check",
    },
    unsaved="trains nothing that could be saved",
    in_lesson={"skipped_round": ("range(ranks - 1):  # one finished chunk per round", "range(ranks - 2):")},
    reading=(
        "experiments/comm/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/comm/__init__.py: an all_reduce made of single sends and receives, a ring message by"
        " message, and what a run does",
        "experiments/comm/primitives.py: each rank's tensors before and after each primitive, and its backward pass",
        "distlab/techniques/collectives/point_to_point.py, then ring.py, direct.py, tree.py or rooted.py: the variants",
        "distlab/techniques/transport/tcp.py: small sums over plain TCP",
        "experiments/comm/checks.py: the inputs and the expected outputs, by rank, position and repeat",
        "experiments/comm/benchmark.py: latency, bandwidth and bytes from 1 KiB to 64 MiB",
    ),
)
