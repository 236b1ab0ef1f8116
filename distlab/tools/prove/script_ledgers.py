"""Findings from the ledgers of all ranks alone: samples, schedules, metrics, random states and optimizers."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distlab.lab.cluster import name_ranks
from distlab.lab.report.units import counted
from distlab.tools.check.judge.fault import and_more
from distlab.tools.check.judge.rank_state import Finding

SAMPLES, SCHEDULE, METRICS, RANDOM, OPTIMIZER, STATISTICS, STATES = CHECKS = (
    "the samples", "the schedule", "the metrics", "the random states", "the optimizer", "the statistics",
    "states put back",
)  # fmt: skip
RUNNING = ("running_mean", "running_var")
LONGER, FEWEST = 1.5, 4  # a schedule continues for so many times its length; steps
CLOSE, TIMES = 1e-4, 10

Ledger = Mapping[str, Any]


def ledger_findings(ranks: Sequence[Ledger], reference: Ledger | None) -> Iterator[Finding]:
    """Yield the certain findings."""
    everyone = tuple(range(len(ranks)))
    for check, sentences in (
        (SAMPLES, [*read_twice(ranks), *wrongly_assigned(ranks)]),
        (SCHEDULE, stepped_too_often(ranks)), (RANDOM, shared_random_state(ranks)),
        (METRICS, means_of_means(ranks, reference) if reference else ()),
        (OPTIMIZER, foreign_parameters(ranks)), (STATISTICS, different_evaluations(ranks)),
        (STATES, wrongly_restored(ranks)),
    ):  # fmt: skip
        for sentence in sentences:
            yield Finding(check, sentence, everyone)


def passes_of(ranks: Sequence[Ledger]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield each pass over a loader that all ranks made."""
    by_rank = [{(each["line"], each["turn"]): each for each in ledger["passes"]} for ledger in ranks]
    for key in by_rank[0]:
        if all(key in each for each in by_rank):
            yield [each[key] for each in by_rank]


def read_twice(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield evaluation samples that several ranks have read, if the ranks' parts are combined."""
    size = len(ranks)
    for passes in passes_of(ranks):
        first = passes[0]
        read = [Counter(each["indices"]) for each in passes]
        trains = any(each["trains"] or each["length"] != first["length"] for each in passes)
        trains = trains or not all(each["ended"] for each in passes)
        if trains or not first["reduced"] or first["length"] < 1 or not all(read):
            continue
        total = sum(read, Counter[int]())
        twice = sorted(index for index, count in total.items() if count > 1)
        if len({frozenset(each) for each in read}) == 1 or not twice:
            continue  # every rank evaluates all of it
        shown = ", ".join(map(str, twice[:4])) + (", ..." if len(twice) > 4 else "")
        verb = "are" if len(twice) > 1 else "is"
        yield (
            f"{counted(len(twice), 'samples')} at {first['line']} {verb} read twice ({shown}): the"
            f" sampler pads them to a multiple of {size} ranks, and {first['reduced']} counts the padding; give each"
            " rank Subset(data, range(rank, len(data), world_size)), or drop the padding"
        )
        return


def wrongly_assigned(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield samples of a training epoch that are in several parts of the data, or in none, beyond a sampler's padding
    or dropping. Ranks that read the same samples, as along a tensor-parallel axis, have one part."""
    for passes in passes_of(ranks):
        first = passes[0]
        parts = list(dict.fromkeys(tuple(each["indices"]) for each in passes))
        own = any(len(set(part)) < len(part) for part in parts)
        if len(parts) < 2 or own or not all(each["trains"] and each["ended"] and each["indices"] for each in passes):
            continue
        total = Counter(index for part in parts for index in part)
        spare = len(parts) * (1 + max(first["sizes"]))
        twice = sum(count > 1 for count in total.values())
        missing = first["length"] - len(total)
        where = f"of an epoch at {first['line']}"
        if twice > spare and all(len(part) == first["length"] for part in parts):
            yield (
                f"each rank reads all {first['length']} samples {where}, in its own order: each counts {len(parts)}"
                " times; give the loader a DistributedSampler"
            )
        elif twice > spare:
            yield (
                f"{counted(twice, 'samples')} {where} are in several ranks' parts of the data: give the loader a"
                " DistributedSampler, or parts that do not overlap"
            )
        elif missing > spare:
            yield (
                f"{counted(missing, 'samples')} {where} are in no rank's part of the {first['length']}: they are"
                " missing in every epoch"
            )
        else:
            continue
        return


def stepped_too_often(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield a schedule that ends after 1/N of the steps, since each optimizer step steps it N times."""
    size, first = len(ranks), ranks[0]
    steps = first["steps"]
    for kind, stepped, length, line in first["schedules"]:
        times = stepped / steps if steps else 0.0
        if steps < FEWEST or size < 2 or not math.isclose(times, size, rel_tol=0.1):
            continue
        rates = [tuple(each) for each in first["rates"]]
        over = length and stepped >= LONGER * length and math.isclose(length, steps, rel_tol=0.1)
        at_end = len(set(rates[math.ceil(steps / size) :])) == 1 and len(set(rates)) > 2
        if over or (not length and at_end):
            whose = f"of {length} steps" if length else "by lambda"
            yield (
                f"{kind} {whose} is stepped {size} times per optimizer step ({stepped} times in {steps} steps, {line}):"
                f" the learning rate reaches its end after 1/{size} of the run; step the schedule once per optimizer"
                " step, which is how its length is counted"
            )


def shared_random_state(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield a random state that all ranks take from one, if each had its own before, and that is then used."""
    if len(ranks) < 2 or not all(ledger["set"] for ledger in ranks):
        return
    for each in zip(*(ledger["set"] for ledger in ranks), strict=False):
        step, _, line = each[0]
        before = [ledger["states"][step - 1] for ledger in ranks if 0 < step <= len(ledger["states"])]
        later = [ledger["states"][step:] for ledger in ranks]
        drawn = all(len(set(states)) > 1 for states in later)
        equal = all(len(set(states)) == 1 for states in zip(*later, strict=False))
        if any(other[:2] != each[0][:2] for other in each) or len(set(before)) < len(ranks) or not (drawn and equal):
            continue
        yield (
            f"all ranks load one rank's random state at {line} after step {step - 1}, though each had its own before:"
            " now they draw the same numbers (dropout, noise) for different samples; save one state per rank"
        )
        return


def foreign_parameters(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield an optimizer whose parameters get no gradient, while a model has others that do."""
    found = [ledger["strangers"] for ledger in ranks]
    steps = min(ledger["steps"] for ledger in ranks)
    if all(len(each) >= min(3, steps) > 0 and all(others for _, others, _ in each) for each in found):
        mine, others, line = found[0][0]
        yield (
            f"the optimizer's {counted(mine, 'parameters')} are not the model's: none has a gradient at {line}, but"
            f" {others} others do, and no optimizer has those; create the optimizer after the model is wrapped or"
            " sharded"
        )


def different_evaluations(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield a model that ranks evaluate with different tensors, such as BatchNorm statistics, or a copy that one rank
    updates. If initial weights differed, as for slices, only statistics count."""
    equal_start = len({tuple(sorted(ledger["first"].items())) for ledger in ranks}) == 1
    for each in zip(*(ledger["statistics"] for ledger in ranks), strict=False):
        steps, (first, *others) = {number for number, _, _ in each}, [states for _, states, _ in each]
        if len(steps) != 1 or any(set(other) != set(first) for other in others):
            continue
        differing = [name for name, state in first.items() if any(other[name] != state for other in others)]
        statistics = [name for name in differing if name.rpartition(".")[2] in RUNNING]
        where = f"evaluated at {each[0][2]}, after step {each[0][0] - 1}"
        if statistics:
            yield (
                f"running_mean and running_var differ between {name_ranks(list(range(len(ranks))))} when the model is"
                f" {where}: each rank has those of its own samples, so the ranks evaluate different models; first"
                " average them over the ranks, or broadcast rank 0's"
            )
            return
        if differing and equal_start:
            yield (
                f"{and_more(differing)} differ between ranks when a model is {where}: the ranks evaluate different"
                " models; update it on every rank, or broadcast it first"
            )
            return


def wrongly_restored(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield an optimizer that gets its own state back on rank 0 only: each rank has a different state, such as a shard,
    but the file has only rank 0's."""
    kept = [ledger["kept"] for ledger in ranks]
    if len({tuple((what, step) for what, step, _, _ in mine) for mine in kept}) > 1:
        return
    for index, (what, step, state, line) in enumerate(kept[0]):
        before = [place for place in range(index) if kept[0][place][0] == "saved" and kept[0][place][2] == state]
        if what != "loaded" or not before:
            continue
        wrong = [
            rank for rank, mine in enumerate(kept)
            if mine[before[-1]][2] != state and mine[index][2] != mine[before[-1]][2]
        ]  # fmt: skip
        if wrong:
            yield (
                f"the optimizer's state that {name_ranks(wrong)} loaded at {line} is not its own of step {step - 1},"
                " and rank 0's is: each rank has a different state, so each must save and load its own"
            )
            return


def means_of_means(ranks: Sequence[Ledger], reference: Ledger) -> Iterator[str]:
    """Yield a number that is the mean of the ranks' means, where one rank has the mean over all samples."""
    wanted = {(each["line"], each["turn"]): each for each in reference["metrics"]}
    by_rank = [{(each["line"], each["turn"]): each for each in ledger["metrics"]} for ledger in ranks]
    for key, right in wanted.items():
        mine = [each.get(key) for each in by_rank]
        metrics = [each for each in mine if each is not None and len(each["values"]) == len(right["values"])]
        read = [each["read"] for each in metrics]
        if len(metrics) < len(ranks) or not all(read) or max(read) == min(read) or right["step"] != metrics[0]["step"]:
            continue
        for index, value in enumerate(right["values"]):
            values = [each["values"][index] for each in metrics]
            total = sum(values)
            weighed = sum(count * each for count, each in zip(read, values, strict=True)) / sum(read)
            off = min(abs(total / len(ranks) - value), abs(total - value))
            if abs(weighed - value) <= CLOSE * abs(value) <= off / TIMES:
                yield (
                    f"the value reduced at {key[0]} is a mean of the ranks' means, {total / len(ranks):.6g}, but the"
                    f" mean over all samples is {value:.6g}: the ranks have {', '.join(map(str, read))} samples; reduce"
                    " sums and counts, then divide"
                )
                return


def remarks(ranks: Sequence[Ledger], reference: Sequence[Ledger], size: int) -> Iterator[str]:
    """Yield remarks on differences by design, or perhaps intended ones; they do not fail the proof."""
    first = ranks[0]
    if any(ledger["dropped"] for ledger in ranks):
        yield "dropout was off, on the ranks and in the reference"
    if any(ledger["normalised"] for ledger in ranks):
        yield (
            "BatchNorm normalises each rank's samples separately, and so does the reference: with all samples on one"
            " rank its results would differ"
        )
    for other in reference:
        pairs = [
            (one, two)
            for mine, theirs in zip(first["rates"], other["rates"], strict=False)
            for one, two in zip(mine, theirs, strict=False)
        ]
        if any(not math.isclose(one, two, rel_tol=1e-6) for one, two in pairs):
            times = [one / two if two else math.inf for one, two in pairs]
            if max(times) - min(times) < 1e-6 * max(times):
                yield f"the learning rate is {times[0]:g} x that of 1 rank in every step: scaled with the {size} ranks"
            else:
                yield f"the learning rate differs from that of 1 rank: its schedule depends on the {size} ranks"
