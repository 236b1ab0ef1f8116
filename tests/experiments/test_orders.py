"""The checks of each mode on the order of events in a step, with made-up orders: correct ones pass, wrong ones fail."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from distlab.contract import Strategy, Variant
from distlab.experiments import dp
from distlab.experiments.dp import checks
from distlab.experiments.fsdp import checks as sharded
from distlab.experiments.pp.bugs import all_ahead, one_more_ahead
from distlab.experiments.pp.checks import most_saved
from distlab.experiments.tp import checks as sliced
from distlab.lab.config import Config
from distlab.lab.measure.event_order import Event, Order
from distlab.lab.rank.mode_loader import load
from distlab.lab.report.reading import from_line
from distlab.lab.report.verdict import judge
from distlab.lab.verify.counted import Saved
from distlab.lab.verify.pipeline_checks import Pass, assign_weight_passes, broken_rules, passes
from distlab.lab.workload import model as models
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.pipeline_parallel import schedules
from distlab.techniques.pipeline_parallel.costs import in_flight
from tests.labs import TINY, failed, one_rank, run_experiment
from tests.techniques.pipeline_parallel.in_flight import most_in_flight
from tests.warm_ranks import Ranks

SUM, GATHER, SCATTER = sliced.SUM, sliced.GATHER, sliced.SCATTER


def order_of(
    events: Sequence[Event], gradients: dict[str, int] | None = None, weights: dict[str, int] | None = None
) -> Order:
    order = Order({})
    order.events, order.gradients, order.weights = list(events), gradients or {}, weights or {}
    return order


def config_of(run_mode: str, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": run_mode, "WORLD_SIZE": "2"} | settings)


def call(op: str, storage: int = 0) -> Event:
    return Event("call", op, "", 4, frozenset({storage}))


def gradient(name: str) -> Event:
    return Event("gradient", "", name)


END = Event("end", "backward", "0")


# --- dp: two buckets, storage 7 of the last layer and 8 of the first ---

LAST_SUM, FIRST_SUM = call(SUM, 7), call(SUM, 8)
GRADIENTS = [gradient("1.w"), gradient("1.b"), gradient("0.w"), gradient("0.b")]
BUCKETS = {"1.w": 7, "1.b": 7, "0.w": 8, "0.b": 8}


@pytest.mark.parametrize(
    ("events", "early", "untimely"),
    [
        ([*GRADIENTS[:2], LAST_SUM, *GRADIENTS[2:], FIRST_SUM, END], 2, 0),
        ([*GRADIENTS, END, LAST_SUM, FIRST_SUM], 0, 1),  # only the sum of the first layer may be launched this late
        ([*GRADIENTS, LAST_SUM, FIRST_SUM, END], 2, 1),  # before the end, but not immediately
        ([GRADIENTS[0], LAST_SUM, *GRADIENTS[1:], FIRST_SUM, END], 2, 1),  # before its gradients are computed
        ([*GRADIENTS[2:], *GRADIENTS[:2], LAST_SUM, FIRST_SUM, END], 2, 0),  # launched in the fixed order
    ],
    ids=["at_once", "after", "late", "too_soon", "in_turn"],
)
def test_dp_early_and_late_bucket_launches_are_counted(events: list[Event], early: int, untimely: int) -> None:
    order = order_of(events, BUCKETS)
    assert checks.early(order) == early
    assert len(order.untimely(order.launches(*checks.SENDS))) == untimely


@pytest.mark.parametrize(
    ("events", "most"),
    [
        ([*GRADIENTS[:2], LAST_SUM, *GRADIENTS[2:], FIRST_SUM, END], 0),
        ([*GRADIENTS, LAST_SUM, FIRST_SUM, END], 10),
        ([*GRADIENTS[2:], *GRADIENTS[:2], FIRST_SUM, LAST_SUM, END], 0),  # only the first layer's bucket waits
    ],
)
def test_dp_bytes_waiting_for_the_first_layer_are_counted(events: list[Event], most: int) -> None:
    """A weight's gradient comes before its bias's, which is registered after it: 8 and 2 bytes in the last layer."""
    assert checks.waiting(order_of(events, BUCKETS), {"0.w": 4, "0.b": 1, "1.w": 8, "1.b": 2}) == most


def test_dp_gradient_sizes_equal_the_models() -> None:
    config = Config.read({"RUN_MODE": "dp", "LAB_TIE": "1", "LAB_DEPTH": "1", "LAB_WIDTH": "16", "LAB_HEADS": "2"})
    sizes = checks.gradient_sizes(config)
    assert list(sizes)[:2] == ["0.token.weight", "0.position.weight"]
    assert sizes["0.token.weight"] == 4 * 256 * 16
    assert not any(name.endswith("project.weight") for name in sizes)


# --- pp: every schedule follows the rules of the papers, and each broken rule is detected ---


SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8, 13)))


def passes_of(actions: list[schedules.Action], ranks: int) -> list[Pass]:
    return [Pass(action.kind, action.stage // ranks, action.microbatch) for action in actions]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_pp_schedules_follow_the_rules_of_the_papers(ranks: int, microbatches: int) -> None:
    by_name = {
        ("gpipe", 1): schedules.gpipe(ranks, microbatches),
        ("1f1b", 1): schedules.one_forward_one_backward(ranks, microbatches),
        ("interleaved", 2): schedules.interleaved(ranks, microbatches, 2),
        ("interleaved", 3): schedules.interleaved(ranks, microbatches, 3),
        ("zb_h1", 1): schedules.zb_h1(ranks, microbatches),
        ("zbv", 2): schedules.zbv(ranks, microbatches),
    }
    if microbatches >= 2 * ranks:
        by_name["dualpipev", 2] = schedules.dualpipev(ranks, microbatches)
    for (name, chunks), schedule in by_name.items():
        for rank, actions in enumerate(schedule):
            assert broken_rules(name, passes_of(actions, ranks), rank, ranks, microbatches, chunks) == []
            assert most_in_flight(actions) == in_flight(name, ranks, microbatches, rank, chunks)


def swap(order: list[Pass], one: int, other: int) -> list[Pass]:
    order = list(order)
    order[one], order[other] = order[other], order[one]
    return order


def test_pp_every_broken_rule_is_detected() -> None:
    ranks, many = 3, 6
    right = passes_of(schedules.one_forward_one_backward(ranks, many)[1], ranks)
    split = passes_of(schedules.split_backwards(schedules.one_forward_one_backward(ranks, many)[1]), ranks)
    gpipe = passes_of(schedules.gpipe(ranks, many)[1], ranks)
    assert broken_rules("zb_h1", gpipe, 1, ranks, many, 1) == [
        "not every microbatch runs forward, input, weight exactly once in each chunk"
    ]
    assert broken_rules("1f1b", split, 1, ranks, many, 1) == [
        "not every microbatch runs forward, backward exactly once in each chunk"
    ]
    assert broken_rules("1f1b", passes_of(all_ahead(ranks, many)[1], ranks), 1, ranks, many, 1) == [
        "6 forwards come before the first backward, but the rule says 2"
    ]
    assert broken_rules("gpipe", right, 1, ranks, many, 1)[0].startswith("2 forwards come before")
    more = passes_of(one_more_ahead(ranks, many)[1], ranks)
    assert broken_rules("1f1b", more, 1, ranks, many, 1) == [
        "3 forwards come before the first backward, but the rule says 2"
    ]
    assert broken_rules("1f1b", right[:-1], 1, ranks, many, 1) == [
        "not every microbatch runs forward, backward exactly once in each chunk"
    ]
    assert "forwards are not in the order" in broken_rules("1f1b", swap(right, 0, 1), 1, ranks, many, 1)[0]
    assert any("alternate" in fault for fault in broken_rules("1f1b", swap(right, 3, 4), 1, ranks, many, 1))
    late = [*right[:2], *right[3:], right[2]]
    assert any("backwards are not in the order" in fault for fault in broken_rules("1f1b", late, 1, ranks, many, 1))
    before = broken_rules("zb_h1", swap(split, 2, 3), 1, ranks, many, 1)
    assert "weight of a microbatch comes before its input" in before
    assert broken_rules("zb_h1", split, 1, ranks, many, 1) == [
        "the gradients of weights do not directly follow that of the input 1 microbatch later"
    ]
    v = passes_of(schedules.zbv(ranks, many)[1], ranks)
    assert any(
        "forwards are not in the order" in fault for fault in broken_rules("zbv", swap(v, 0, 1), 1, ranks, many, 2)
    )
    chunked = passes_of(schedules.interleaved(ranks, many, 2)[1], ranks)
    other_way = [each._replace(chunk=1 - each.chunk) if each.kind == "backward" else each for each in chunked]
    assert broken_rules("interleaved", chunked, 1, ranks, many, 2) == []
    assert broken_rules("interleaved", other_way, 1, ranks, many, 2) != []


def test_pp_split_backward_passes_are_recognized() -> None:
    def run(kind: str, *events: Event) -> list[Event]:
        return [Event("begin", kind, "0"), *events, Event("end", kind, "0")]

    ran = [Event("begin", "layer", layer) for layer in "0145"]
    back = [Event("back", "layer", layer) for layer in "54"]  # no gradient of their parameters yet
    tied = [gradient("4.w"), gradient("4.b"), gradient("0.w")]  # the last layer shares the first one's weight
    events = [*run("forward", *ran[:2]), *run("forward", *ran[2:]), *run("input", *back), *run("weight", *tied)]
    done = passes(order_of(events))
    assert done == [("forward", 0, 0), ("forward", 1, 0), ("input", 1, 0), ("weight", 1, 0)]
    assert most_saved([*done, Pass("forward", 0, 1)], dict.fromkeys([(0, 0), (1, 0), (0, 1)], Saved(30, 4))) == 60
    assert most_saved([*done[:3], Pass("forward", 0, 1)], dict.fromkeys([(0, 0), (1, 0), (0, 1)], Saved(30, 4))) == 64


def test_pp_silent_weight_passes_are_assigned_to_chunks() -> None:
    seen = Pass("weight", 1, 0)
    assert assign_weight_passes([seen, Pass("weight", -1, 0)], 2) == [seen, Pass("weight", 0, 0)]
    unseen = [Pass("weight", -1, 0)] * 2
    # The backward pass begins with the last chunk.
    assert assign_weight_passes(unseen, 2) == [Pass("weight", 1, 0), Pass("weight", 0, 0)]
    # One too many stays unassigned.
    assert assign_weight_passes([seen, *unseen], 2)[1:] == [Pass("weight", 0, 0), unseen[0]]
    assert assign_weight_passes([Pass("input", -1, 0)], 1) == [Pass("input", -1, 0)]


def test_pp_passes_are_recognized_by_their_layers() -> None:
    def forward(microbatch: str, *layers: str) -> list[Event]:
        ran = [Event("begin", "layer", layer) for layer in layers]
        return [Event("begin", "forward", microbatch), *ran, Event("end", "forward", microbatch)]

    def backward(microbatch: str, *names: str) -> list[Event]:
        return [Event("begin", "backward", microbatch), *map(gradient, names), Event("end", "backward", microbatch)]

    events = [*forward("0", "0", "1"), *forward("0", "4"), *backward("0", "4.w"), *backward("0", "1.w", "0.b", "0.w")]
    assert passes(order_of(events)) == [
        ("forward", 0, 0), ("forward", 1, 0), ("backward", 1, 0), ("backward", 0, 0)
    ]  # fmt: skip
    assert most_saved(passes(order_of(events)), {(0, 0): Saved(30, 9), (1, 0): Saved(4, 1)}) == 34


# --- tp: the collectives of a layer ---


def order_of_layers(forward: Sequence[Sequence[str]], backward: Sequence[str]) -> Order:
    """Return the order of a pass whose layers make these calls; the last entry of `forward` is the loss."""
    events = [Event("begin", "forward", "0")]
    for index, ops in enumerate(forward[:-1]):
        events += [Event("begin", "layer", str(index)), *map(call, ops), Event("end", "layer", str(index))]
    events += [*map(call, forward[-1]), Event("end", "forward", "0")]
    return order_of([*events, Event("begin", "backward", "0"), *map(call, backward), END])


def test_tp_misplaced_collectives_are_named() -> None:
    config = config_of("tp", LAB_DEPTH="1")
    block = (GATHER, SCATTER, GATHER, SCATTER)
    back = (SCATTER, *block, GATHER)
    right = [(SCATTER,), block, (GATHER,), (SUM, SUM)]
    assert sliced.misplaced("sequence", order_of_layers(right, back), config) == []
    early = [(SCATTER, GATHER), (SCATTER, GATHER, SCATTER, GATHER), (), (SUM, SUM)]  # a gather after each scatter
    assert (
        "layer 0 calls reduce_scatter, all_gather forward"
        in sliced.misplaced("sequence", order_of_layers(early, back), config)[0]
    )
    assert "differ from call 0 on" in sliced.misplaced("sequence", order_of_layers(right, back[::-1]), config)[0]
    whole = [(SUM,), (SUM, SUM), (), (SUM, SUM)]
    assert sliced.misplaced("megatron", order_of_layers(whole, (SUM,) * 3), config) == []
    assert (
        "5 calls backward, not 3" in sliced.misplaced("megatron", order_of_layers(whole, (SUM,) * 5), config)[0]
    )  # one each for q, k and v
    each = [(), (GATHER,) * 6, (GATHER,), ()]
    assert sliced.misplaced("gathered", order_of_layers(each, (SUM,) * 7), config) == []


# --- fsdp: which weights are gathered ---

WEIGHTS = {f"{layer}.w": 100 + layer for layer in range(5)}  # 3 layers and both ends


def weights_sized(layer: int, nbytes: int) -> Event:
    return Event("held", "", "", nbytes, frozenset({100 + layer}))


def gathering_order(ahead: int, *, last: int = 4) -> Order:
    """Return a step that gathers each layer and `ahead` layers after it, and frees a layer when it has computed."""
    events, gathered = [], set[int]()
    for forward in (True, False):
        events.append(Event("begin", "forward" if forward else "backward", "0"))
        for layer in range(last + 1) if forward else range(last, -1, -1):
            step = 1 if forward else -1
            for near in range(layer, layer + step * (ahead + 1), step):
                if 0 <= near <= last and near not in gathered:
                    gathered.add(near)
                    events.append(weights_sized(near, 64))
            events.append(Event("begin", "layer", str(layer)) if forward else gradient(f"{layer}.w"))
            gathered.discard(layer)
            events.append(weights_sized(layer, 0))
        events.append(Event("end", "forward" if forward else "backward", "0"))
    return order_of(events, weights=WEIGHTS)


def test_fsdp_weights_gathered_too_early_or_long_are_named() -> None:
    config = config_of("fsdp", LAB_DEPTH="3")
    assert sharded.wrongly_gathered("zero3", gathering_order(1), config, reshard=True) == []
    assert sharded.most_gathered(gathering_order(1)) == sharded.allowed_gathered("zero3", config, reshard=True) == 2
    too_many = gathering_order(2)
    assert sharded.most_gathered(too_many) == 3
    assert "at layer 0 forward layers 0, 1, 2 are gathered, not 0, 1" in sharded.wrongly_gathered(
        "zero3", too_many, config, reshard=True
    )
    nothing_ahead = sharded.wrongly_gathered("zero3", gathering_order(0), config, reshard=True)
    assert "at layer 4 backward layers 4 are gathered, not 3, 4" in nothing_ahead
    not_freed = gathering_order(1)
    not_freed.events = [event for event in not_freed.events if event != weights_sized(0, 0)]
    assert "units still gathered after the step: 1" in sharded.wrongly_gathered(
        "zero3", not_freed, config, reshard=True
    )


def test_fsdp_late_gradient_sums_are_named() -> None:
    config = config_of("fsdp", LAB_DEPTH="3")
    names = [f"{layer}.{name}" for layer in range(4, -1, -1) for name in "wb"]
    begin = Event("begin", "backward", "0")
    at_once = [
        event
        for name in names
        for event in ([gradient(name), call("send")] if name.endswith("b") else [gradient(name)])
    ]
    later = [*map(gradient, names), *[call("send")] * 5]
    assert sharded.unsummed(order_of([begin, *at_once, END]), config, 2) == []
    assert len(sharded.unsummed(order_of([begin, *later, END]), config, 2)) == 4  # the last one is on time
    assert len(sharded.unsummed(order_of([begin, *at_once, END, begin, *later, END]), config, 1)) == 4
    gathers = order_of(
        [begin, *(call("send", 100) if event.what == "call" else event for event in at_once), END], weights=WEIGHTS
    )
    assert len(sharded.unsummed(gathers, config, 3)) == 5


# --- memory: tensors kept too long raise the peak ---


class Retaining(Replica):
    """Retain the autograd graph and the loss of each microbatch."""

    def backward(self, microbatches: list[Microbatch]) -> torch.Tensor:
        self.gradients.zero()
        losses: list[torch.Tensor] = []
        for inputs, targets, share in microbatches:
            with self.gradients.accumulate(last=len(losses) == len(microbatches) - 1):
                losses.append(self.forward(inputs, targets) * share)
                losses[-1].backward(retain_graph=True)
        self.gradients.finish()
        return torch.stack(losses).sum().detach()


def run_retaining_rank(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[str]:
    """Run one rank whose `flat` retains the graphs."""

    def flat(model: Model, mesh: Mesh, config: Config) -> Strategy:
        strategy = dp.flat(model, mesh, config)
        strategy.__class__ = Retaining
        return strategy

    return one_rank(group, settings, folder, replace(load("dp"), variants=(Variant("flat", flat),)))


@pytest.mark.timeout(120)
def test_dp_retained_graphs_fail_the_peak(ranks: Ranks, tmp_path: Path) -> None:
    settings = TINY | {"RUN_MODE": "dp", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LAB_VARIANT": "flat"}
    settings |= {"LAB_MODEL": "mlp", "LAB_MICROBATCHES": "4", "LAB_STEPS": "1", "LAB_PROOF": "0"}
    lines = ranks(2, run_retaining_rank, settings, str(tmp_path))
    run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert "peak bytes" in failed(run)


@pytest.mark.timeout(120)
def test_fsdp_late_sums_fail_the_peak(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "fsdp", "LAB_VARIANT": "zero2", "LAB_BUG": "late_sums", "LAB_PROOF": "0", "LAB_STEPS": "1"}
    settings |= {"LAB_BATCH": "2", "LAB_MODEL": "mlp", "LAB_WIDTH": "32"}
    run, _ = run_experiment(ranks, 2, tmp_path, **settings)
    assert failed(run) == {"peak bytes", "sums"}


def run_without_recomputation(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[str]:
    """Run one rank whose layers ignore LAB_RECOMPUTE."""
    with patch.object(models, "recomputed", lambda layer, hidden: layer(hidden)):
        return one_rank(group, settings, folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["dp", "fsdp"])
def test_missing_recomputation_fails_the_run(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    variant = {"dp": "flat", "fsdp": "zero2"}[mode]
    settings = TINY | {"RUN_MODE": mode, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LAB_VARIANT": variant}
    settings |= {"LAB_RECOMPUTE": "1", "LAB_STEPS": "1", "LAB_PROOF": "0", "LAB_DEPTH": "3"}
    lines = ranks(2, run_without_recomputation, settings, str(tmp_path))
    run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert failed(run) == {"recomputed peak", "computed again"}


def test_dp_on_one_rank_passes(ranks: Ranks, tmp_path: Path) -> None:
    run, _ = run_experiment(ranks, 1, tmp_path, RUN_MODE="dp", LAB_VARIANT="bucketed,ring", LAB_BUCKET_MIB="0.001")
    assert not failed(run)
