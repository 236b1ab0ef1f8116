"""Elastic training: ranks die, come back and rejoin, and training continues with the present ones.

Large runs lose a rank every few hours. Restarting costs all ranks the start and every step since the last checkpoint.
But a process group is only a set of connections. A killed process closes them, so the others notice at once; they leave
the group, agree on the members and on the last valid step, and create a new group in the same processes (Horovod
Elastic; torchft). No rank is special: each has a store, and the lowest living rank coordinates.

  rule        the global batch stays the same, divided by the members of the step; with LAB_RESCALE=1 each rank
              keeps its part: fewer members make the batch smaller, and the learning rate too (the linear scaling rule;
              Goyal et al. 2017). In any case the run equals one process: weights, moments and losses to 1e-12, and
              each sample is used once per epoch
  kept        a step that any survivor has applied is valid, and ranks that lack it copy it
  redone      a step that no survivor has applied is computed again by the survivors
  predicted   a loss costs at most one repeated step (`restart`, `zero1`: those since the checkpoint, at most
              LAB_SAVED_EVERY); a step sends 2(N-1)/N x 8 B x (P + E + 2) per rank, E + 3 with sharded state; a
              newcomer receives 8 B x (3P + LAB_STEPS x (E + 1)), or P/N of moments; moments take 16 B x P, sharded
              16 B x P/N
  shapes      weights [P] and AdamW's moments [2, P] as flat vectors in float64, E samples per epoch

  restart     like torchrun: all ranks restart from the last checkpoint
  shrink      the survivors continue with N-1
  join        a dead rank comes back as an empty process, and joins at the next step
  zero1       join with the optimizer's state sharded (ZeRO-1) and resharded when the members change; a loss also
              loses a shard, so all ranks return to the last checkpoint

Fault injection kills LAB_LOSSES ranks of each variant, at steps that LAB_SEED draws: they close their sockets as the
kernel does for a killed process, and lose all state. With LAB_LOSSES=0 only you kill ranks: `docker kill`. A paused or
partitioned rank sends no heartbeats: after LAB_LOST_AFTER_S the majority declares it dead; the minority stops with a
message.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from distlab.contract import Mode, Variant, untrainable
from distlab.lab.cluster.membership import View
from distlab.lab.cluster.views import BEGIN
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.techniques.elastic.process_group import Regroup
from distlab.techniques.elastic.strategy import Report, ShardedSurvivor, Survivor

from . import lesson
from .bugs import mistake
from .checks import check_claims, claims, count, show, what_changed
from .network import BACK, Net, let_leave, open_net, settle
from .options import Options
from .recovery import Audit, Course, Event, LossPlan, Policy, draw_losses

POLICIES = (
    Policy("restart", restarts=True),
    Policy("shrink"),
    Policy("join", returns=True),
    Policy("zero1", returns=True, sharded=True),
    Policy("plain"),
)
# Former variants and bugs.
REMOVED = {
    "spare": "use LAB_VARIANT=join, which readmits the rank that died",
    "peer_memory": "use LAB_VARIANT=zero1, whose shards are restored from a checkpoint",
    "rescaled": "use LAB_VARIANT=join LAB_RESCALE=1, which does the same",
    "stale_copies": "no copies are kept; use LAB_BUG=old_cut for wrong shards",
    "wrong_keeper": "no copies are kept; use LAB_BUG=old_cut for wrong shards",
}


class OnePage(Survivor):
    """A replica that keeps, copies or repeats a step with the lesson's functions."""

    def decide(self, reports: Mapping[int, Report], newcomers: Iterable[int]) -> Report:
        """Decide from the members' reports; newcomers lack everything."""
        applied, source, behind = lesson.decide({rank: int(report["applied"]) for rank, report in reports.items()})
        return {"applied": applied, "source": source, "behind": [*behind, *newcomers]}

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        """Continue in a new group."""
        any_group: Any = group
        source = ranks.index(plan["source"])
        state = lesson.catch_up(self.state(), any_group, source, plan["behind"], self.rank)
        if state is not None:
            self.set_state(state, int(plan["applied"]))


def cannot(config: Config) -> dict[str, str]:
    """Exclude variants that need survivors if there is one rank."""
    if config.world_size > 1:
        return {}
    return dict.fromkeys(
        ("shrink", "join", "zero1", "plain"), f"WORLD_SIZE={config.world_size}: no rank is left to continue"
    )


def refuse(config: Config) -> list[str]:
    """Return errors for models that cannot be trained, and for anything but float64 on a CPU."""
    refusals = untrainable(config)
    if config.device != "cpu":
        refusals.append(
            f"LAB_DEVICE={config.device!r} is not possible in elastic, allowed: cpu, because its groups use gloo"
        )
    return refusals


def run(lab: Lab, survivor: type[Survivor] = Survivor, sharded: type[ShardedSurvivor] = ShardedSurvivor) -> None:
    """Run every variant with its losses; then the survivors compare each with one process."""
    returned = lab.hooks.membership is not None and lab.hooks.membership.rejoined
    unable = lab.mode.cannot(lab.config)
    wanted = [policy for policy in POLICIES if policy.name in lab.mode.names and lab.wants(policy.name)]
    kinds = {policy.name: sharded if policy.sharded else survivor for policy in POLICIES}
    kinds["plain"] = OnePage if survivor is Survivor else survivor
    for policy in [] if returned else wanted:
        if policy.name in unable:
            lab.skip(policy.name, unable[policy.name])
    chosen = [policy for policy in wanted if policy.name not in unable]
    makers = {policy: maker(lab, kinds[policy.name]) for policy in chosen}
    net = open_net(lab)
    for policy in [] if returned else chosen:
        count(lab, net, policy, makers[policy]())
    courses = [prepare(lab, net, policy, makers[policy], dies=not returned) for policy in chosen]
    called_at = time.time()
    let_leave(lab, net)
    view, courses = find_entry(net, courses) if returned else (None, courses)
    for course in courses:
        deaths = ", ".join(f"rank {loss.rank} at step {loss.step}" for loss in course.loss_plan.losses)
        lab.say(f"{course.policy.name}: {deaths or 'no rank'} is killed by fault injection", "drill")
        course.run(view)
        note_course(lab, course)
        if view is not None and course.commits:
            at, step = course.commits[0]
            after = f"rejoined at step {step} of {course.policy.name}, {at - called_at:.2f} s after its first packet"
            lab.say(after, "back", all_ranks=True)
        view = None
    settle(lab, net)
    for course in courses:
        check_claims(lab, course)
    show(lab, courses)
    net.group.leave()


def note_course(lab: Lab, course: Course) -> None:
    """Log on each rank its steps of a variant, when it was killed, and the members after each change."""
    me = course.policy.name
    killed = [loss.step for loss in course.loss_plan.losses if loss.rank == lab.rank]
    lab.note(me, "all ranks begin" + "".join(f"; I am killed at step {step}" for step in killed))
    for event in course.events:
        lab.note("", f"members from step {event.applied} on: {', '.join(map(str, event.after))} ({view_origin(event)})")
    applied = f"my weights include {course.training.applied} steps, of which I computed {course.computed}"
    lives = f" in {course.lives} lives, each from saved or received state" if course.lives > 1 else ""
    lab.note("", "I did not rejoin" if killed and not course.training.applied else applied + lives)


def view_origin(event: Event) -> str:
    """Return the cause of a view and the time to its next step; only the cause if another change came first."""
    took = f", {1000 * (event.next_step_at - event.began_at):.0f} ms" if event.next_step_at else ""
    return what_changed(event) + took


def maker(lab: Lab, kind: type[Survivor]) -> Callable[..., Survivor]:
    """Return a factory of new trainings of one kind; its argument is called between the parts of a step."""

    def make(at: Callable[[str], None] = lambda moment: None) -> Survivor:  # noqa: ARG005
        batches, rescale = lab.batches(torch.float64, proof=True), lab.config.own(Options).rescale
        return kind(lab.model(torch.float64), batches, lab.config, lab.rank, lab.config.steps, at, rescale=rescale)

    return make


def find_entry(net: Net, courses: list[Course]) -> tuple[View | None, list[Course]]:
    """On a rank that has returned: join the running variant, or wait for the next one.

    Returns the view that it has joined, if any, and the variants in which it takes part.
    """
    view = net.membership.ask({"as": BACK})
    name = net.membership.begun().removeprefix(f"{BEGIN} ") if view is None else view.plan["variant"]
    places = [place for place, course in enumerate(courses) if course.policy.name == name]
    return view, courses[places[0] :] if places else []


def prepare(lab: Lab, net: Net, policy: Policy, make: Callable[..., Survivor], *, dies: bool) -> Course:
    """Return this rank's course through a variant; `dies` enables the deaths that LAB_SEED draws."""
    config, own = lab.config, lab.config.own(Options)
    members = list(range(lab.world_size))
    seed = 1000 * config.seed + POLICIES.index(policy)
    losses = draw_losses(seed, members, config.steps, own.losses, returns=policy.restarts or policy.returns)
    folder = lab.journal.folder
    assert folder is not None, "a rank that trains has a folder"
    return Course(
        net, policy, make, LossPlan(losses if dies else [], lab.rank), Audit(lab, policy.name),
        saved=folder / f"{policy.name}.rank{lab.rank}.pt", saved_every=own.saved_every,
        on_step=lambda step: lab.begin_step(step, policy.name),
    )  # fmt: skip


MODE = Mode(
    variants=tuple(
        Variant(each.name, by_name=each.name == "plain", like="shrink" * (each.name == "plain")) for each in POLICIES
    ),
    run=run,
    claims=lambda mode, config: claims(mode, config, config.own(Options)),
    options=Options,
    refuse=refuse,
    cannot=cannot,
    mistakes=mistake,
    gone=REMOVED,
    stepped=True,
    takes_back=True,
    unsaved="saves its own checkpoints, every LAB_SAVED_EVERY steps of restart and zero1",
    in_lesson={"oldest_state": ("most = max(applied.values())", "most = min(applied.values())")},
    reading=(
        "experiments/elastic/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/elastic/__init__.py: the variants, and what a run claims",
        "experiments/elastic/recovery.py: one rank's course through a variant, and its audit",
        "distlab/techniques/elastic/strategy.py: a replica whose steps are kept or repeated, and one with shards",
        "distlab/techniques/elastic/shards.py: which rank has which part, and what moves",
        "distlab/lab/cluster/membership.py: how the remaining ranks agree on the members",
        "distlab/techniques/elastic/process_group.py: gloo groups, created and left repeatedly in one process",
        "distlab/lab/cluster/rank_server.py: the connections whose end shows the death of a rank",
        "distlab/lab/cluster/rejoin.py: how a restarted rank finds the others",
        "experiments/elastic/checks.py: the single-process reference, which follows the membership record",
    ),
)
