"""A recorded block contains the phases that ran inside it, nested and in the order in which they ended."""

import threading
import time

import pytest
import torch

from distlab.techniques.collectives.phases import listening, phase, recorded, slowed

pytestmark = pytest.mark.timeout(30)


def test_only_phases_inside_the_block_are_recorded() -> None:
    with phase("forward", "0"):
        pass
    with recorded() as spans, phase("forward", "1"), phase("all_reduce"):
        pass
    with phase("backward", "1"):
        pass
    assert [(span.kind, span.label) for span in spans] == [("all_reduce", ""), ("forward", "1")]
    inner, outer = spans
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s


def test_a_phase_that_raises_is_recorded() -> None:
    with recorded() as spans:
        with pytest.raises(ValueError, match="inside"), phase("forward"):
            raise ValueError("inside")
        with phase("backward"):
            pass
    assert [span.kind for span in spans] == ["forward", "backward"]


def test_an_inner_block_records_its_phases_alone() -> None:
    with recorded() as outer:
        with recorded() as inner, phase("send"):
            pass
        with phase("receive"):
            pass
    assert [span.kind for span in inner] == ["send"]
    assert [span.kind for span in outer] == ["receive"]


def test_phases_of_other_threads_are_not_recorded() -> None:
    def elsewhere() -> None:
        with phase("forward"):
            pass

    with recorded() as spans:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert spans == []


def test_backward_on_another_thread_counts_for_its_caller() -> None:
    """On CUDA, autograd runs one thread per device, and each has its own context."""
    events: list[str] = []
    number = torch.ones((), requires_grad=True)

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        with phase("all_reduce", "3"):
            return gradient

    number.register_hook(summed)
    with recorded() as spans, listening(lambda what, kind, label: events.append(f"{what} {kind} {label}")):
        engine = threading.Thread(target=(number * 2).backward)
        engine.start()
        engine.join()
    assert [(span.kind, span.label) for span in spans] == [("all_reduce", "3")]
    assert events == ["begin all_reduce 3", "end all_reduce 3"]
    (number * 2).backward()
    assert len(spans) == 1  # the block has ended


class Device:
    """A simulated GPU: kernels run one after the other, each for 10 s, and events record their times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done_s = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = max(device.done_s, time.perf_counter())

            def elapsed_time(self, other: "Event") -> float:
                return 1000 * (other.at_s - self.at_s)

        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)

    def launch(self) -> None:
        self.done_s = max(self.done_s, time.perf_counter()) + 10


def test_gpu_phases_last_as_long_as_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    with recorded(torch.device("cuda", 0)) as spans:
        with phase("forward", "0"):
            device.launch()
        with phase("backward", "0"):
            device.launch()
            with phase("all_reduce"):
                device.launch()
    assert [span.kind for span in spans] == ["forward", "all_reduce", "backward"]
    lasted = {span.kind: span.end_s - span.start_s for span in spans}
    assert lasted == pytest.approx({"forward": 10, "backward": 20, "all_reduce": 10}, abs=0.5)
    by_kind = {span.kind: span for span in spans}
    assert by_kind["backward"].start_s == pytest.approx(by_kind["forward"].end_s, abs=0.5)


def sleeps_of(monkeypatch: pytest.MonkeyPatch, share: float, kinds: list[str]) -> list[float]:
    """The seconds slept after phases of these kinds. Each takes 3 s of CPU time and 10 s of wall-clock time."""
    slept: list[float] = []
    cpu, wall = iter(range(0, 300, 3)), iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(cpu)))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(wall)))
    monkeypatch.setattr(time, "sleep", slept.append)
    with slowed(share):
        for kind in kinds:
            with phase(kind):
                pass
    with phase("forward"):  # the block has ended
        pass
    return slept


def test_a_slowed_rank_sleeps_in_proportion_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["forward", "backward", "all_reduce", "optimizer", "wait"]
    assert sleeps_of(monkeypatch, 0.5, kinds) == [3.0, 3.0]
    assert sleeps_of(monkeypatch, 0.25, ["backward"]) == [9.0]
    assert sleeps_of(monkeypatch, 1.0, kinds) == []


def test_sleep_is_part_of_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [0.0]

    def sleep(seconds: float) -> None:
        at[0] += seconds

    def work() -> float:
        at[0] += 1.0
        return at[0]

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "thread_time", work)
    monkeypatch.setattr(time, "perf_counter", lambda: at[0])
    with recorded() as spans, slowed(0.1), phase("backward"):
        pass
    assert spans[0].end_s - spans[0].start_s == pytest.approx(1 + 1 + 9)
    with slowed(0.1), pytest.raises(ValueError, match="inside"), phase("forward"):
        raise ValueError("inside")
    assert at == [pytest.approx(12)]
