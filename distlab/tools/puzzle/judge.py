"""Judge the ranks' results: calls, tensors, bounds. Each error is a sentence.

The tensors are compared with those of one process, and the first that differs is explained: by a typical error with
exactly these numbers, by a factor, or by the positions of the differing numbers.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from distlab.tools.puzzle.task import MESSAGES, TOLERANCE, Bound, Report, Task, Tensors

# Gloo also sends a header and a request per message: measured 48 bytes each way, once per chunk.
OVERHEAD_BYTES = 256  # per message
ROUNDING = 0.01  # bounds are fractions of bytes


def judge(task: Task, world_size: int, reports: Sequence[Report]) -> str:
    """Return a sentence on the first error; empty if all is right."""
    checks: list[Callable[[Task, int, Sequence[Report]], str]] = [forbidden, unequal, inspected, over_bound]
    return next((sentence for check in checks if (sentence := check(task, world_size, reports))), "")


def inspected(task: Task, world_size: int, reports: Sequence[Report]) -> str:
    return task.inspect(world_size, reports)


def forbidden(task: Task, world_size: int, reports: Sequence[Report]) -> str:  # noqa: ARG001
    for rank, report in enumerate(reports):
        for call in report.calls:
            if call.op not in task.allowed:
                allowed = ", ".join(sorted(task.allowed)) or "no call at all"
                return f"{call.op} is called at {call.line or 'a library'} on rank {rank}; allowed here: {allowed}"
    return ""


def unequal(task: Task, world_size: int, reports: Sequence[Report]) -> str:
    """Describe the first tensor that differs, in order of the task, then of the ranks."""
    expected, suspects = task.expected(world_size), task.suspects(world_size)
    for name in dict.fromkeys(name for tensors in expected for name in tensors):
        for rank in range(world_size):
            if name not in expected[rank]:
                continue
            fault = difference(reports[rank].tensors.get(name), expected[rank][name])
            if fault:
                why = explained(name, rank, reports, expected, suspects)
                return f"{name} on rank {rank} differs from one process: {fault}{why}"
    return ""


def difference(found: Tensor | None, expected: Tensor) -> str:
    """Describe how a tensor differs; empty if it does not."""
    if not isinstance(found, Tensor):
        return f"it is {found!r}, not a tensor"
    if found.shape != expected.shape:
        return f"its shape is {list(found.shape)}, expected {list(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"its type is {found.dtype}, expected {expected.dtype}"
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    apart = (found - expected).abs()
    wrong = ~(apart <= allowed)  # so that NaN is wrong, too
    if not bool(wrong.any()):
        return ""
    worst = float(apart.max())
    text = f"by {worst:.3g}, allowed {allowed:.0e}, in {int(wrong.sum())} of {found.numel()} numbers"
    places = wrong.reshape(-1).nonzero().reshape(-1)
    first, last = int(places[0]), int(places[-1])
    if 0 < len(places) == last - first + 1 < found.numel():
        text += f", those from {first} to {last}"
    return text


def explained(
    name: str,
    rank: int,
    reports: Sequence[Report],
    expected: Sequence[Tensors],
    suspects: Mapping[str, Sequence[Tensors]],
) -> str:
    """Return the reason, if known, as "; ...", else an empty text."""
    found, right = reports[rank].tensors.get(name), expected[rank][name]
    if not isinstance(found, Tensor) or found.shape != right.shape:
        return ""
    for words, tensors in suspects.items():
        if name in tensors[rank] and not difference(found, tensors[rank][name]):
            return f"; it is {words}"
    for other, theirs in enumerate(expected):
        if other != rank and name in theirs and not difference(found, theirs[name]):
            return f"; it is what rank {other} should have"
    factor = factor_of(found, right)
    if factor is None:
        return ""
    n = len(reports)
    named = {float(n): "the number of ranks", 1 / n: "1 / the number of ranks", 0.0: "nothing was written"}
    words = next((f" ({words})" for value, words in named.items() if abs(value - factor) < 1e-9), "")
    return f"; it is {factor:.6g} times what it should be{words}"


def factor_of(found: Tensor, right: Tensor) -> float | None:
    """Return the factor by which all numbers are too large; None if there is none."""
    found, right = found.double(), right.double()
    size = float((right * right).sum())
    if size == 0 or not bool(torch.isfinite(found).all()):
        return None
    factor = float((found * right).sum()) / size
    return factor if not difference(found, factor * right) else None


def over_bound(task: Task, world_size: int, reports: Sequence[Report]) -> str:
    """Return the first bound that is exceeded."""
    bound = task.bound(world_size)
    n = f"with {world_size} rank{'s' * (world_size > 1)}"
    if bound.all_bytes is not None and (sent := sum(each.sent_bytes for each in reports)) > bound.all_bytes + ROUNDING:
        return f"all ranks together send {sent:,.0f} bytes {n}, allowed {bound.all_bytes:,.0f}"
    for rank, report in enumerate(reports):
        for what, value, most in (
            ("bytes are sent", report.sent_bytes, bound.rank_bytes),
            ("messages are sent", report.num_messages, bound.messages),
            ("collectives are called", report.num_calls, bound.calls),
            ("bytes of tensors are kept at one time", report.peak_bytes, bound.peak_bytes),
        ):
            if most is not None and value > most + ROUNDING:
                return f"{value:,.0f} {what} on rank {rank} {n}, allowed {most:,.0f}"
        if hidden := unexplained(task, report, bound):
            return f"rank {rank}: {hidden}"
    return ""


def unexplained(task: Task, report: Report, bound: Bound) -> str:
    """Report sent bytes that no recorded call explains, if only messages are allowed: their bytes are known,
    while gloo sends more than the best algorithm in some collectives."""
    if report.wire_bytes is None or bound.rank_bytes is None or not task.allowed <= MESSAGES:
        return ""
    explained_bytes = report.sent_bytes + OVERHEAD_BYTES * (1 + len(report.calls))
    if report.wire_bytes <= explained_bytes:
        return ""
    return f"its sockets sent {report.wire_bytes:,} bytes, but its messages contain only {report.sent_bytes:,.0f}"
