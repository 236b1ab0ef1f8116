"""Pipeline parallelism: the layers of a model in stages, one stage per rank, and microbatches that pass through them.

A model cut between its layers needs little communication, one activation per cut, and a rank stores only a p-th of it.
But a rank can work only on what the rank before it has finished. With the batch in one piece all ranks but one wait at
any time; m microbatches fill the pipe, and only filling and draining it idles: the bubble.

  predicted   bubble: (p-1)/(m+p-1) of all ranks' time (Narayanan et al. 2021, "Megatron-LM", section 2.2).
              Bytes: A = B·S·D elements per cut and direction, so 2A per rank, A for the first and the last one; 2v·A
              with chunks, less A at the model's two ends. In flight: m microbatches in gpipe, min(m, p-r) in 1f1b
  shapes      inputs [B, S] on every rank; between stages [b, S, D], b samples of a microbatch (mlp: [b, D])

The variants compute the same in different orders:

  one_microbatch  the whole batch as one microbatch: the model is split, the work is not
  gpipe           all microbatches forward, then all backward: every rank stores the activations of all m
  1f1b            backwards as early as possible: the bubble of gpipe, but rank r stores at most p - r of the m
  interleaved     1f1b with two stages per rank: the pipe fills twice as fast, for twice the messages
  zb_h1           1f1b that sends gradients of inputs before it computes those of weights, which later ranks defer to
                  the time when they would wait
  zbv             the same with two stages per rank, arranged like a V: the last rank has two neighbouring stages
  dualpipev       on the same V, forwards and backwards alternate; needs at least 2p microbatches
  torch_...       torch.distributed.pipelining's Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
                  and ScheduleDualPipeV

Ranks that share cores show no bubble, since one computes while another waits: LAB_SLEEP_MS simulates compute without
using a core.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.contract import Mode, Strategy, Variant
from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.counted import check_in_flight
from distlab.lab.verify.pipeline_checks import draw_on_paper, note_schedule
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model, outline
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Peers, sendable
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.pipeline_parallel import schedules
from distlab.techniques.pipeline_parallel.costs import bubble
from distlab.techniques.pipeline_parallel.pipeline import Pipeline
from distlab.techniques.pipeline_parallel.pretend import pretend_compute
from distlab.techniques.pipeline_parallel.strategy import (
    ByHand,
    Lesson,
    Parts,
    Pipelined,
    joined,
    parts_of,
    runs_of,
)

from . import lesson
from .bugs import mistake
from .checks import check_order, claims
from .options import Options
from .predictions import cannot, owners_of, passed_bytes, predict, refuse

Scheduled: TypeAlias = Callable[[int, int], schedules.Schedule]  # by p ranks and m microbatches
SCHEDULES: dict[str, Scheduled] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_forward_one_backward,
    "zb_h1": schedules.zb_h1,
    "zbv": schedules.zbv,
    "dualpipev": schedules.dualpipev,
}


# --- one_microbatch: one rank works at a time ---


def one_microbatch(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The whole batch passes from rank to rank and back."""
    parts = parts_of(model, mesh.group)
    pretend_compute(parts.stages, config, config.own(Options).sleep_ms, {})
    width = config.width if model.name == "gpt" or is_own(config.model) else None
    return Pipelined(parts, Blocking(parts, model.loss, mesh.group, width), mesh.group, config)


class Blocking:
    """An engine of blocking messages: each rank waits for the previous one, in the backward for the next one."""

    def __init__(self, parts: Parts, loss: nn.Module, group: dist.ProcessGroup, width: int | None) -> None:
        (self.stage,) = parts.stages.values()
        self.loss, self.width, self.peers = loss, width, Peers(group)
        self.saved: list[tuple[Tensor, Tensor]] = []  # input and output of the stage, for the backward pass
        self.most_in_flight = 0

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        inputs, targets, share = joined(microbatches)
        rank, last = self.peers.rank, self.peers.world_size - 1
        hidden = self.received(rank - 1, inputs).requires_grad_() if rank > 0 else inputs
        with phase("forward", "0"):
            output: Tensor = self.stage(hidden)
            if rank == last:
                output = self.loss(output, targets) * share
        self.saved.append((hidden, output))
        self.most_in_flight = max(self.most_in_flight, len(self.saved))
        if rank < last:
            self.send(output.detach(), rank + 1)
        gradient = self.received(rank + 1, inputs) if rank < last else None
        hidden, output = self.saved.pop()
        with phase("backward", "0"):
            torch.autograd.backward(output, gradient)  # with the gradient of its output, or of the loss itself
        if hidden.grad is not None:
            self.send(hidden.grad, rank - 1)
        return output.detach() if rank == last else None

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send; returns when `rank` has received it."""
        with phase("send", "0"):
            self.peers.send(0, rank, sendable(tensor, self.peers)).wait()

    def received(self, rank: int, inputs: Tensor) -> Tensor:
        """Return what `rank` sends: a whole batch between stages, [B, S, D] for gpt, [B, D] for mlp."""
        shape = inputs.shape if self.width is None else (*inputs.shape, self.width)
        dtype, host = next(self.stage.parameters()).dtype, None if self.peers.batched else "cpu"
        buffer = inputs.new_empty(shape, dtype=dtype, device=host)  # gloo cannot send GPU tensors
        with phase("receive", "0"):
            self.peers.receive(0, rank, buffer).wait()
        return buffer.to(inputs.device)


# --- microbatches, in the order of a schedule ---


def by_hand(model: Model, mesh: Mesh, config: Config, *, name: str) -> Strategy:
    """Our pipeline runs this rank's part of the schedule `name`."""
    schedule = schedule_of(config, name)
    assert schedule is not None
    owners = schedules.owners(schedule)
    parts = parts_of(model, mesh.group, owners)
    pipeline = Pipeline(parts.stages, schedule[mesh.group.rank()], mesh.group, owners)
    pretend_compute(parts.stages, config, config.own(Options).sleep_ms, pipeline.splits)
    return Pipelined(parts, ByHand(pipeline, model.loss), mesh.group, config)


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: 1f1b with plain messages."""
    parts = parts_of(model, mesh.group)
    rows = (config.seq,) if model.name == "gpt" or is_own(config.model) else ()
    pretend_compute(parts.stages, config, config.own(Options).sleep_ms, {})
    (stage,) = parts.stages.values()
    engine = Lesson(lesson.Pipeline(stage, model.loss, (*rows, config.width), mesh.group))
    return Pipelined(parts, engine, mesh.group, config)


def by_torch(model: Model, mesh: Mesh, config: Config, *, name: str) -> Strategy:
    """A schedule of PyTorch on the same stages."""
    from .pytorch import PyTorchPipeline  # its import takes most of a second

    parts = parts_of(model, mesh.group, owners_of(name, mesh.group.size(), config.own(Options).chunks))
    pretend_compute(parts.stages, config, config.own(Options).sleep_ms, {})
    return Pipelined(parts, PyTorchPipeline(name, parts, model.loss, mesh.group, config), mesh.group, config)


# --- the run ---


def run(lab: Lab) -> None:
    config, ranks, microbatches = lab.config, lab.world_size, lab.config.num_microbatches
    share = bubble(ranks, microbatches)
    lab.say(
        f"in gpipe and 1f1b ranks idle for (p-1)/(m+p-1) = {share:.0%} of a step with p={ranks}, m={microbatches}; "
        f"each cut passes {passed_bytes(config) / 1e6:.3g} MB in each direction",
        "predict",
    )
    lab.note("holds", stored_layers(config, lab.rank))
    note_schedule(lab, partial(schedule_of, config))
    measured = measure(lab, also=partial(check_most_in_flight, lab))
    draw_on_paper(lab, partial(schedule_of, config))
    lab.compare_predictions(lab.mode.predict(config), measured)
    for name in [name for name in measured if name not in lab.mode.by_torch]:
        check_order(lab, name, measured[name], order_of(name), owners_of(name, ranks, config.own(Options).chunks))


def check_most_in_flight(lab: Lab, name: str, strategy: Strategy) -> None:
    """Check the microbatches in flight; variants have their schedules' names."""
    assert isinstance(strategy, Pipelined)
    check_in_flight(lab, name, strategy, order_of(name))


def schedule_of(config: Config, variant: str) -> schedules.Schedule | None:
    """Return the schedule of a variant, PyTorch's too where it is known; None for a user's strategy."""
    ranks, microbatches = config.world_size, config.num_microbatches
    schedules_by_name: dict[str, Scheduled] = {
        "one_microbatch": lambda ranks, _: schedules.one_microbatch(ranks),
        "interleaved": partial(schedules.interleaved, chunks=config.own(Options).chunks),
    }
    variant = order_of(variant)
    schedules_by_name |= SCHEDULES | {f"torch_{name}": SCHEDULES[name] for name in ("1f1b", "zbv", "dualpipev")}
    return schedules_by_name[variant](ranks, microbatches) if variant in schedules_by_name else None


def order_of(variant: str) -> str:
    """Return the name of a variant's schedule."""
    return "1f1b" if variant == "plain" else variant


def stored_layers(config: Config, rank: int) -> str:
    """Return the layers of a rank's stage, for its log."""
    num_layers = len(outline(config).layers)
    run = runs_of(config.model, num_layers, config.world_size)[rank]
    return f"with one stage per rank, {len(run)} of {num_layers} layers: {', '.join(map(str, run))}"


def ours(name: str, sentence: str) -> Variant:
    return Variant(name, partial(by_hand, name=name), sentence=sentence)


SPLIT = (
    "1f1b with split backward passes: a rank sends the gradient of its input first, and rank r computes those of its"
    " weights r microbatches later."
)


def pytorchs(name: str, sentence: str) -> Variant:
    return Variant(name, partial(by_torch, name=name), by_torch=True, sentence=sentence)


MODE = Mode(
    shards=True,
    variants=(
        Variant("one_microbatch", one_microbatch, formerly="naive"),
        ours("gpipe", "All microbatches forward, then all backward."),
        ours("1f1b", "Each rank first runs one forward per later rank, then one forward and one backward in turn."),
        ours("interleaved", "1f1b with two smaller stages per rank."),
        ours("zb_h1", SPLIT),
        ours("zbv", "Two stages per rank: the layers go down the ranks and up again."),
        ours("dualpipev", "The same stages; forwards and backwards of both directions alternate."),
        pytorchs("torch_1f1b", "PyTorch's 1f1b: it sends and receives in one call, and waits for both."),
        pytorchs(
            "torch_interleaved_zb",
            "PyTorch's interleaved schedule, which computes gradients of weights where a rank would wait.",
        ),
        pytorchs("torch_zbv", "PyTorch's zbv."),
        pytorchs("torch_dualpipev", "PyTorch's dualpipev."),
        Variant("plain", plain, by_name=True, like="1f1b"),
    ),
    headline=("1f1b", "forward until there is a gradient, then one forward and one backward in turn"),
    run=run,
    claims=claims,
    options=Options,
    axes=lambda config: {"pp": config.world_size},
    predict=lambda config: predict(config, config.own(Options).chunks),
    refuse=refuse,
    cannot=lambda config: cannot(config, config.own(Options).chunks),
    mistakes=mistake | checkpoints.mistake,
    gone={
        "1f1b_split": "zb_h1 splits its backward passes too",
        "torch_gpipe": "torch_1f1b is PyTorch's schedule with one stage per rank",
        "weights_first": "LAB_BUG=gpipes_order fails the same check",
        "never_late": "LAB_BUG=gpipes_order fails the same check",
        "swapped_microbatches": "LAB_BUG=stale_activation mixes up microbatches too",
    },
    in_lesson={
        "undivided_loss": ("self.loss(output, targets) * share", "self.loss(output, targets) / len(targets)"),
    },
    reading=(
        "experiments/pp/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/pp/__init__.py: the variants, the simplest first, and what a run of them checks",
        "distlab/techniques/pipeline_parallel/schedules.py: which rank works on which microbatch when",
        "distlab/techniques/pipeline_parallel/pipeline.py: runs a schedule with real layers",
        "distlab/techniques/pipeline_parallel/zero_bubble.py: split backward passes",
        "distlab/techniques/pipeline_parallel/strategy.py: a model cut into stages, and the training step that all"
        " variants share",
    ),
)
