"""Check the executed schedule against the papers' rules: predicates on the recorded order of passes.

This file does not use distlab/techniques/pipeline_parallel/schedules.py, which makes the schedules: otherwise a wrong
line there would be accepted here. A pass is identified by the layers that run in it or, in a backward, by the
parameters that get gradients; its microbatch by the phase's label.

  gpipe         all forwards, then all backwards (Huang et al. 2019, section 2.3)
  1f1b          p-1-r forwards ahead, then one forward and one backward in turn, then the remaining backwards (Narayanan
                et al. 2021, section 2.2.1): min(m, p-r) microbatches are kept
  interleaved   chunk by chunk per group of microbatches, 2(p-1-r) + (v-1)·g passes ahead, g being the first group's
                size (section 2.2.2; Megatron's groups have p). Groups share m as evenly as possible
  zb_h1         forwards and inputs' gradients as in 1f1b, those of weights r microbatches later (Qi et al. 2023, 3.1)
  zbv           each chunk processes its microbatches in order, down before up (section 6)
  dualpipev     the same

Both parts of a split backward pass are checked.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple, get_args

from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Event, Order
from distlab.lab.report import records
from distlab.lab.report.tables import row
from distlab.lab.report.timeline import Span, step_seconds
from distlab.lab.workload.data import shard_sizes
from distlab.techniques.pipeline_parallel.costs import FOLDED, UNSPLIT, ahead, idle_share
from distlab.techniques.pipeline_parallel.schedules import Action, Kind, Schedule, simulate, stages_of

BACK = ("backward", "input")  # the passes that send a gradient


class Pass(NamedTuple):
    """A pass of a microbatch through one of this rank's chunks, forward or backward."""

    kind: Kind
    chunk: int  # counted from the model's first layers
    microbatch: int


def passes(order: Order) -> list[Pass]:
    runs: list[tuple[int, Kind, Counter[str], int]] = []
    for kind in get_args(Kind):
        for place, (label, events) in zip(order.where("begin", kind), order.within(kind), strict=True):
            runs.append((place, kind, Counter(filter(None, map(layer_of, events))), int(label)))
    chunks = sorted({frozenset(seen) for _, kind, seen, _ in runs if kind == "forward"}, key=lambda c: min(map(int, c)))
    done = [
        Pass(kind, chunk_of(seen, chunks), microbatch) for _, kind, seen, microbatch in sorted(runs, key=itemgetter(0))
    ]
    return assign_weight_passes(done, len(chunks))


def assign_weight_passes(done: list[Pass], chunks: int) -> list[Pass]:
    """Assign weight passes without visible events to their chunk, one without a linear layer, such as an embedding's. A
    microbatch comes back through its last chunk first."""
    without_events = [chunk for chunk in range(chunks) if ("weight", chunk) not in {(kind, of) for kind, of, _ in done}]
    left = defaultdict[int, list[int]](without_events.copy)
    return [
        each._replace(chunk=left[each.microbatch].pop())
        if each.kind == "weight" and each.chunk < 0 and left[each.microbatch]
        else each
        for each in done
    ]


def layer_of(event: Event) -> str | None:
    """Return the layer of an event: running, reached by autograd, or owner of a parameter with a new gradient."""
    if (event.what, event.name) in (("begin", "layer"), ("back", "layer")):
        return event.label
    return event.label.split(".")[0] if event.what == "gradient" else None


def chunk_of(seen: Counter[str], chunks: list[frozenset[str]]) -> int:
    """Return the chunk with most of the events (a tied weight has another layer's name); -1 without events."""
    if len(chunks) == 1:
        return 0
    found = [sum(seen[layer] for layer in chunk) for chunk in chunks]
    return found.index(max(found)) if any(found) else -1


def broken_rules(name: str, done: list[Pass], rank: int, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Return sentences for the rules of schedule `name` that `rank`'s passes break; `chunks` per rank."""
    whole = name in UNSPLIT
    by_kind = {kind: [each for each in done if each.kind == kind] for kind in get_args(Kind)}
    every = sorted((chunk, number) for chunk in range(chunks) for number in range(microbatches))
    wanted: tuple[Kind, ...] = ("forward", "backward") if whole else ("forward", "input", "weight")
    if any(sorted((c, m) for _, c, m in some) != (every if kind in wanted else []) for kind, some in by_kind.items()):
        return [f"not every microbatch runs {', '.join(wanted)} exactly once in each chunk"]
    place = {each: index for index, each in enumerate(done)}
    faults = [
        f"{later} of a microbatch comes before its {sooner}"
        for sooner, later in pairwise(wanted)
        if any(place[each._replace(kind=sooner)] > place[each] for each in by_kind[later])
    ]
    turned = [each for each in done if each.kind != "weight"]
    back = [each for each in turned if each.kind in BACK]
    group = group_of(microbatches, ranks) if name == "interleaved" else [0] * microbatches
    for kind, some, way in (("forwards", by_kind["forward"], 1), ("backwards", back, -1)):
        keys = [(group[m], way * chunk, m) for _, chunk, m in some]
        if name in FOLDED:  # each chunk in its own order
            keys.sort(key=lambda key: key[1])
        if keys != sorted(keys):
            faults.append(f"{kind} are not in the order of groups, chunks and microbatches")
    allowed = ahead(name, ranks, microbatches, rank, chunks)
    found = turned.index(back[0])
    if found != allowed:
        faults.append(f"{found} forwards come before the first backward, but the rule says {allowed}")
    turns = [each.kind for each in turned[found:]]
    turns = turns[: len(turns) - turns[::-1].index("forward")] if "forward" in turns else []
    if name not in FOLDED and any(one == other for one, other in pairwise(turns)):
        faults.append("forwards and backwards do not alternate after the first backward")
    if not whole and name not in FOLDED:
        faults += untimely_weights(done, rank)
    return faults


def untimely_weights(done: list[Pass], late: int) -> list[str]:
    """Return a sentence if weights do not directly follow the input's gradient of `late` microbatches later, or end."""
    inputs, wanted = [each for each in done if each.kind == "input"], []
    for each in done:
        if each.kind != "weight":
            wanted.append(each)
        if each.kind == "input" and inputs.index(each) >= late:
            wanted.append(inputs[inputs.index(each) - late]._replace(kind="weight"))
    wanted += [each._replace(kind="weight") for each in inputs[max(0, len(inputs) - late) :]]
    behind = f"that of the input {late} microbatch{'es' * (late > 1)} later" if late else "that of the input"
    return [] if done == wanted else [f"the gradients of weights do not directly follow {behind}"]


def group_of(microbatches: int, ranks: int) -> list[int]:
    """Return the group of each microbatch: at least p in each if there are as many, larger groups first."""
    sizes = shard_sizes(microbatches, max(1, microbatches // ranks))
    return [group for group, size in enumerate(sizes) for _ in range(size)]


# All ranks' orders, simulated with passes of equal length, must idle as long as the formula says: this detects a valid
# order that waits without need. On a mesh each row of ranks along pp is a pipeline.

CONTROL = "tests/lab/verify/test_pipeline_checks.py::"
THIRDS: dict[Kind, float] = {"forward": 1, "input": 1, "weight": 1, "backward": 2}  # of a microbatch's work on a stage


class Piped(NamedTuple):
    schedule: str
    microbatches: int
    owners: list[int]  # the rank along pp of each stage


def check_schedule(lab: Lab, name: str, order: Order, piped: Piped) -> list[Pass]:
    """Check that passes follow the schedule, and idle no more than its formula; a collective of all ranks.

    Return this rank's passes, none if it breaks a rule.
    """
    place, ranks = lab.mesh.index("pp"), lab.mesh.size("pp")
    done, chunks = passes(order), len(stages_of(place, piped.owners))
    faults = broken_rules(piped.schedule, done, place, ranks, piped.microbatches, chunks)
    detail = "; ".join(faults) or f"{len(done)} passes in the order of {piped.schedule}"
    lab.check("schedule", len(faults), 0, name, detail, control=f"{CONTROL}test_passes_out_of_order_fail")
    kept = [] if faults else done
    everyone = along_pp(lab, name, kept)
    if all(everyone):
        check_on_paper(lab, name, everyone, piped)
    return kept


def along_pp(lab: Lab, name: str, done: list[Pass]) -> list[list[Any]]:
    row = [lab.mesh.index(axis) for axis in lab.mesh.groups if axis != "pp"]
    everyone = lab.exchange.everyone(f"order of {name}", [row, done])
    return [passes_there for of_row, passes_there in everyone if of_row == row]


def check_on_paper(lab: Lab, name: str, everyone: list[list[Any]], piped: Piped) -> None:
    """Check that the executed order, with passes of equal length and instant messages, idles as the formula says."""
    owners, ranks = piped.owners, len(everyone)
    ran = [
        [Action(kind, stages_of(rank, owners)[chunk], mb) for kind, chunk, mb in done]
        for rank, done in enumerate(everyone)
    ]
    spans = simulate(ran, THIRDS)
    length = max(own[-1].end_s for own in spans)
    idle = 1 - sum(span.end_s - span.start_s for own in spans for span in own) / (length * ranks)
    share = idle_share(piped.schedule, ranks, piped.microbatches, len(owners) // ranks)
    detail = f"idle: {idle:.3f} in the executed order, {share:.3f} by formula"
    lab.check(
        "bubble on paper", abs(idle - share), 1e-9, name, detail, control=f"{CONTROL}test_an_order_that_waits_fails"
    )


PASS_LENGTHS = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}  # Narayanan et al. 2021, section 2.2
PAPER_COLUMNS, PAPER_NAMES = 56, 12


def note_schedule(lab: Lab, schedule_of: Callable[[str], Schedule | None]) -> None:
    """Log on each rank the logged variant's schedule: who works on which microbatch when, if messages took no time and
    a backward twice as long as a forward."""
    names = [name for name in (lab.mode.headline[0], *lab.mode.names) if lab.wants(name)]
    schedule = next(map(schedule_of, names), None)
    if schedule is None:
        return
    lengths: dict[Kind, float] = {action.kind: PASS_LENGTHS[action.kind] for actions in schedule for action in actions}
    found = [
        [Span(each.kind, each.label, each.start_s, each.end_s) for each in of] for of in simulate(schedule, lengths)
    ]
    drawn: dict[str, list[int]] = defaultdict(list)  # the ranks of a stage share a row
    for rank, spans in enumerate(found):
        drawn[row(spans, step_seconds(found), PAPER_COLUMNS)].append(rank)
    lab.note("schedule", "0-9 forward of that microbatch, a-z its backward, . waits")
    for number, (text, ranks) in enumerate(drawn.items()):
        others = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} .. {ranks[-1]}"
        lab.note("" if number else "on paper", f"{'me' if lab.rank in ranks else others:<{PAPER_NAMES}} {text}")


def draw_on_paper(lab: Lab, schedule_of: Callable[[str], Schedule | None]) -> None:
    """Write on rank 0 each recorded variant's ideal step: its own passes' durations, and instant messages."""
    for drawn in [each for each in lab.journal.records if isinstance(each, records.Timeline)]:
        schedule = schedule_of(drawn.variant)
        if schedule is None or lab.rank:
            continue
        lengths: dict[Kind, list[float]] = {action.kind: [] for action in schedule[0]}
        for passed, _, start_s, end_s in drawn.spans:
            if passed in lengths:
                lengths[passed].append(end_s - start_s)
        if not all(lengths.values()):  # PyTorch splits some backward passes and not others
            continue
        found = simulate(schedule, {kind: median(seconds) for kind, seconds in lengths.items()})
        spans = [[[span.kind, span.label, round(span.start_s, 6), round(span.end_s, 6)] for span in of] for of in found]
        lab.journal.write(records.Ideal(drawn.variant, spans))
