"""Marks: what ran inside a recorded block, nested and in the order of ends, and nothing of what ran outside."""

import threading

import pytest

from workers.parallel.phases import phase, recorded

pytestmark = pytest.mark.timeout(30)


def test_phases_inside_are_recorded_and_others_are_not() -> None:
    with phase("forward", "0"):
        pass
    with recorded() as spans, phase("forward", "1"), phase("all_reduce"):
        pass
    with phase("backward", "1"):
        pass
    assert [(span.kind, span.label) for span in spans] == [("all_reduce", ""), ("forward", "1")]
    inner, outer = spans
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s


def test_a_phase_that_raises_ends_all_the_same() -> None:
    with recorded() as spans:
        with pytest.raises(ValueError, match="inside"), phase("forward"):
            raise ValueError("inside")
        with phase("backward"):
            pass
    assert [span.kind for span in spans] == ["forward", "backward"]


def test_an_inner_block_hides_the_outer_and_gives_it_back() -> None:
    with recorded() as outer:
        with recorded() as inner, phase("send"):
            pass
        with phase("receive"):
            pass
    assert [span.kind for span in inner] == ["send"]
    assert [span.kind for span in outer] == ["receive"]


def test_another_thread_is_another_record() -> None:
    def elsewhere() -> None:
        with phase("forward"):
            pass

    with recorded() as spans:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert spans == []
