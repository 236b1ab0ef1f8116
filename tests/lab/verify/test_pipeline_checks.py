"""Orders of a pipeline's ranks beside schedule and formula, on a grid of two pipelines, made up here."""

from types import SimpleNamespace
from typing import Any

import pytest

from distlab.experiments.pp.bugs import at_once
from distlab.lab.measure.event_order import Event, Order
from distlab.lab.verify.pipeline_checks import Piped, check_schedule
from distlab.techniques.pipeline_parallel import schedules

pytestmark = pytest.mark.timeout(60)

MANY = 5


def order_of(actions: list[schedules.Action]) -> Order:
    """What a rank records that does these actions, a layer a stage."""
    order = Order({})
    for kind, stage, microbatch in actions:
        seen = Event("begin", "layer", str(stage)) if kind == "forward" else Event("gradient", "", f"{stage}.w")
        order.events += [Event("begin", kind, str(microbatch)), seen, Event("end", kind, str(microbatch))]
    return order


def claims(piped: Piped, *pipelines: schedules.Schedule) -> list[dict[str, bool]]:
    """What each rank claims of pipelines beside each other, a row of ranks along pp each."""
    ranks = [(row, place) for row in range(len(pipelines)) for place in range(len(pipelines[0]))]
    values: list[Any] = []

    def of_rank(row: int, place: int, everyone: list[Any]) -> dict[str, bool]:
        found: dict[str, bool] = {}

        def check(name: str, difference: float, tolerance: float, *_: str, **__: str) -> None:
            found[name] = difference <= tolerance

        def exchanged(_: str, value: Any) -> list[Any]:
            values.append(value)
            return everyone

        places, sizes = {"dp": row, "pp": place}, {"dp": len(pipelines), "pp": len(pipelines[0])}
        mesh = SimpleNamespace(index=places.get, size=sizes.get, groups=dict.fromkeys(places))
        lab: Any = SimpleNamespace(mesh=mesh, check=check, exchange=SimpleNamespace(everyone=exchanged))
        check_schedule(lab, "any", order_of(pipelines[row][place]), piped)
        return found

    for row, place in ranks:  # collects what each rank sends
        of_rank(row, place, [[[row], []]])
    everyone = list(values)
    return [of_rank(row, place, everyone) for row, place in ranks]


ALL_PASS = {"schedule": True, "bubble on paper": True}
ONE = Piped("zb_h1", MANY, [0, 1, 2])


MADE = {"1f1b": schedules.one_forward_one_backward, "zb_h1": schedules.zb_h1}


@pytest.mark.parametrize(("name", "other"), [("1f1b", "zb_h1"), ("zb_h1", "1f1b")])
def test_each_row_along_pp_is_a_pipeline_of_its_own(name: str, other: str) -> None:
    ran = MADE[name](3, MANY)
    assert claims(Piped(name, MANY, [0, 1, 2]), ran, ran) == [ALL_PASS] * 6
    assert not any(found["schedule"] for found in claims(Piped(other, MANY, [0, 1, 2]), ran))


def test_passes_out_of_order_fail() -> None:
    """In one pipeline of two: its ranks do not compare the bubble on paper, and the other one passes."""
    right = schedules.zb_h1(3, MANY)
    wrong = [schedules.split_backwards(actions) for actions in schedules.one_forward_one_backward(3, MANY)]
    found = claims(ONE, right, wrong)
    assert found[:3] == [ALL_PASS] * 3
    assert [each["schedule"] for each in found[3:]] == [True, False, False]  # rank 0 puts nothing off
    assert all("bubble on paper" not in each for each in found[3:])


def test_an_order_that_waits_fails() -> None:
    """A V whose gradients of weights directly follow each input's keeps all rules."""
    v = schedules.zbv(3, MANY)
    waits = at_once(3, MANY)
    piped = Piped("zbv", MANY, schedules.owners(v))
    assert claims(piped, v) == [ALL_PASS] * 3
    assert claims(piped, waits) == [ALL_PASS | {"bubble on paper": False}] * 3
    assert claims(piped, v, waits)[:3] == [ALL_PASS] * 3
