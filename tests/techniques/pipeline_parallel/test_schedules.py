"""Schedules without processes: they are complete, in order and free of deadlock."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.pipeline_parallel.schedules import (
    Action,
    Kind,
    Schedule,
    consumer_of,
    dualpipev,
    gpipe,
    interleaved,
    one_forward_one_backward,
    one_microbatch,
    owners,
    producer_of,
    simulate,
    stages_of,
    zb_h1,
    zbv,
)
from tests.techniques.pipeline_parallel.in_flight import most_in_flight

pytestmark = pytest.mark.timeout(60)

RANKS, MICROBATCHES, CHUNKS = st.integers(1, 8), st.integers(1, 20), st.integers(1, 4)
Message = tuple[int, int, Action]  # from, to, and the action that uses it


def all_schedules(ranks: int, microbatches: int, chunks: int) -> dict[str, tuple[Schedule, int, int]]:
    """Each schedule, with its number of microbatches and of stages per rank."""
    return {
        "one_microbatch": (one_microbatch(ranks), 1, 1),
        "gpipe": (gpipe(ranks, microbatches), microbatches, 1),
        "1f1b": (one_forward_one_backward(ranks, microbatches), microbatches, 1),
        "interleaved": (interleaved(ranks, microbatches, chunks), microbatches, chunks),
        "zb_h1": (zb_h1(ranks, microbatches), microbatches, 1),
        "zbv": (zbv(ranks, microbatches), microbatches, 2),
    } | ({"dualpipev": (dualpipev(ranks, microbatches), microbatches, 2)} if microbatches >= 2 * ranks else {})


def message_of(action: Action, places: list[int]) -> Message | None:
    """The message that `action` sends to another rank; `places` is the rank of each stage."""
    consumer = consumer_of(action, len(places))
    if consumer is None or places[consumer.stage] == places[action.stage]:
        return None
    return places[action.stage], places[consumer.stage], consumer


def received_by(action: Action, places: list[int]) -> Message | None:
    """The message that `action` receives from another rank."""
    needed = producer_of(action, len(places))
    if needed is None or places[needed.stage] == places[action.stage]:
        return None
    return places[needed.stage], places[action.stage], action


# --- actions and their order ---


@given(RANKS, MICROBATCHES, CHUNKS)
def test_each_microbatch_passes_each_stage_once(ranks: int, microbatches: int, chunks: int) -> None:
    for schedule, number, stages in all_schedules(ranks, microbatches, chunks).values():
        assert len(schedule) == ranks
        for rank, actions in enumerate(schedule):
            own = stages_of(rank, owners(schedule))
            assert len(own) == stages
            kinds: tuple[Kind, ...] = ("forward", "input", "weight")
            if not any(action.kind == "weight" for action in actions):
                kinds = ("forward", "backward")
            wanted = [Action(kind, stage, each) for kind in kinds for stage in own for each in range(number)]
            assert sorted(actions) == sorted(wanted)
            place = {action: index for index, action in enumerate(actions)}
            for stage in own:
                for each in range(number):
                    turns = [place[Action(kind, stage, each)] for kind in kinds]
                    assert turns == sorted(turns)


@given(RANKS, MICROBATCHES, CHUNKS)
def test_gradients_accumulate_in_microbatch_order(ranks: int, microbatches: int, chunks: int) -> None:
    for schedule, number, _ in all_schedules(ranks, microbatches, chunks).values():
        for actions in schedule:
            by_stage = defaultdict(list)
            for kind, stage, microbatch in actions:
                if kind in ("backward", "weight"):
                    by_stage[stage].append(microbatch)
            assert all(order == list(range(number)) for order in by_stage.values())


# --- messages ---


@given(RANKS, MICROBATCHES, CHUNKS)
def test_sends_match_receives(ranks: int, microbatches: int, chunks: int) -> None:
    for schedule, _, _ in all_schedules(ranks, microbatches, chunks).values():
        sent, received, places = [], [], owners(schedule)
        for actions in schedule:
            sent += [message_of(action, places) for action in actions]
            received += [received_by(action, places) for action in actions]
        assert Counter(filter(None, sent)) == Counter(filter(None, received))
        assert max(Counter(filter(None, sent)).values(), default=1) == 1


@given(RANKS, MICROBATCHES)
def test_a_pair_sends_and_receives_in_one_order(ranks: int, microbatches: int) -> None:
    """Without tags (NCCL), messages between two ranks match by order alone."""
    for name in ("one_microbatch", "gpipe", "1f1b", "zb_h1"):
        schedule, _, _ = all_schedules(ranks, microbatches, 1)[name]
        assert in_one_order(schedule), name


def test_two_ranks_with_chunks_need_tags() -> None:
    assert not in_one_order(interleaved(2, 5, 2))


def in_one_order(schedule: Schedule) -> bool:
    places = owners(schedule)
    sent = [filter(None, (message_of(action, places) for action in actions)) for actions in schedule]
    received = [filter(None, (received_by(action, places) for action in actions)) for actions in schedule]
    orders: list[dict[tuple[int, int], list[Action]]] = [defaultdict(list), defaultdict(list)]
    for order, messages in zip(orders, (sent, received), strict=True):
        for source, target, consumer in (message for of_rank in messages for message in of_rank):
            order[source, target].append(consumer)
    return orders[0] == orders[1]


# --- deadlock, if a send ends only when its receive is posted ---


def completes(schedule: Schedule, *, waits_for_sends: bool, ahead: int = 2) -> bool:
    """Whether all ranks finish if each has `ahead` receives posted at any time and never waits for its sends.

    With `waits_for_sends`, a receive is posted only when it is needed, and the rank waits until its send is received.
    """
    ranks, places = len(schedule), owners(schedule)
    awaited = [[received_by(action, places) for action in actions] for actions in schedule]
    receives = [[message for message in of_rank if message] for of_rank in awaited]
    done = [0] * ranks  # actions of each rank
    sending: list[Message | None] = [None] * ranks
    sent: set[Message] = set()

    def is_posted(message: Message) -> bool:
        target = message[1]
        received = sum(each is not None for each in awaited[target][: done[target]])
        if not waits_for_sends:
            return receives[target].index(message) < received + ahead
        needed = sending[target] is None and done[target] < len(awaited[target]) and awaited[target][done[target]]
        return message in receives[target][:received] or message == needed

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            outgoing = sending[rank]
            if waits_for_sends and outgoing is not None:
                if not is_posted(outgoing):
                    continue
                sending[rank] = None
            if done[rank] == len(actions):
                continue
            incoming = awaited[rank][done[rank]]
            if incoming is not None and not (incoming in sent and is_posted(incoming)):
                continue
            sending[rank] = message_of(actions[done[rank]], places)
            sent |= {sending[rank]} - {None}  # type: ignore[arg-type]
            done[rank] += 1
            moved = True
    return done == [len(actions) for actions in schedule]


@given(RANKS, MICROBATCHES, CHUNKS, st.sampled_from([1, 2, 100]))
def test_no_deadlock_with_asynchronous_sends(ranks: int, microbatches: int, chunks: int, ahead: int) -> None:
    for name, (schedule, _, _) in all_schedules(ranks, microbatches, chunks).items():
        assert completes(schedule, waits_for_sends=False, ahead=ahead), name


def test_blocking_sends_deadlock_in_1f1b() -> None:
    assert completes(gpipe(4, 8), waits_for_sends=True)
    assert completes(one_forward_one_backward(4, 1), waits_for_sends=True)
    assert not completes(one_forward_one_backward(4, 8), waits_for_sends=True)
    assert not completes(one_forward_one_backward(2, 2), waits_for_sends=True)


Launch = frozenset[tuple[str, Message]]


def launches(actions: list[Action], places: list[int]) -> list[Launch]:
    """The rule for NCCL: a receive is launched together with the send before it, if no action but weight gradients lies
    between them."""
    found: list[Launch] = []
    open_send: Message | None = None
    for action in actions:
        if action.kind == "weight":
            continue
        awaited = received_by(action, places)
        parts = {("send", open_send)} if open_send else set()
        parts |= {("receive", awaited)} if awaited else set()
        found += [frozenset(parts)] if parts else []
        open_send = message_of(action, places)
    return [*found, frozenset({("send", open_send)})] if open_send else found


def launches_complete(queues: list[list[Launch]]) -> bool:
    """Whether all launches end if each waits for the one before it and for the other ends of its messages."""
    place = [0] * len(queues)
    moved = True
    while moved:
        moved = False
        begun = {
            part for queue, index in zip(queues, place, strict=True) for launch in queue[: index + 1] for part in launch
        }
        for rank, queue in enumerate(queues):
            if place[rank] < len(queue) and all(
                ("receive" if way == "send" else "send", message) in begun for way, message in queue[place[rank]]
            ):
                place[rank] += 1
                moved = True
    return all(index == len(queue) for index, queue in zip(place, queues, strict=True))


@given(RANKS, st.integers(1, 12), st.integers(1, 3))
def test_no_deadlock_with_grouped_nccl_launches(ranks: int, microbatches: int, chunks: int) -> None:
    for name, (schedule, _, stages) in all_schedules(ranks, microbatches, chunks).items():
        if stages == 1 and name != "interleaved":  # as the next test shows
            assert launches_complete([launches(actions, owners(schedule)) for actions in schedule]), name


def test_interleaved_nccl_launches_deadlock() -> None:
    assert not launches_complete([launches(actions, [0, 1, 2, 3] * 2) for actions in interleaved(4, 8, 2)])


def test_separate_nccl_launches_deadlock() -> None:
    separate = [
        [frozenset({part}) for launch in launches(actions, [0, 1]) for part in sorted(launch, reverse=True)]
        for actions in one_forward_one_backward(2, 4)
    ]
    assert not launches_complete(separate)


# --- memory; tests/techniques/pipeline_parallel/test_pipelines_costs.py compares the bubble with its formula ---


def test_interleaving_limits_microbatches_in_flight() -> None:
    assert most_in_flight(interleaved(4, 64, 2)[0]) == 4 + 2 * 3 + 1


# --- the simulator ---


def test_simulation_waits_for_dependencies() -> None:
    spans = simulate(one_forward_one_backward(2, 2), {"forward": 1, "backward": 2})
    assert [(span.kind, span.label, span.start_s, span.end_s) for span in spans[1]] == [
        ("forward", "0", 1, 2), ("backward", "0", 2, 4), ("forward", "1", 4, 5), ("backward", "1", 5, 7),
    ]  # fmt: skip
    assert [(span.start_s, span.end_s) for span in spans[0]] == [(0, 1), (1, 2), (4, 6), (7, 9)]

    spans = simulate(zb_h1(2, 1), {"forward": 1, "input": 1, "weight": 1})
    assert [[(span.kind, span.start_s) for span in own] for own in spans] == [
        [("forward", 0), ("input", 3), ("weight", 4)], [("forward", 1), ("input", 2), ("weight", 3)]
    ]  # fmt: skip


def test_simulation_names_the_deadlocked_rank() -> None:
    first, second = one_forward_one_backward(2, 2)
    with pytest.raises(ValueError, match=r"rank 0 waits for ever.*backward.*stage=0"):
        simulate([first[::-1], second], {"forward": 1, "backward": 2})


def test_dualpipev_needs_2p_microbatches() -> None:
    with pytest.raises(ValueError, match="dualpipev takes at least 2p = 6 microbatches, not 5"):
        dualpipev(3, 5)
