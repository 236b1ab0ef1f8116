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


def ledger_findings(ranks: Sequence[Ledger], alone: Ledger | None) -> Iterator[Finding]:
    """Yield the certain findings."""
    everyone = tuple(range(len(ranks)))
    for check, sentences in (
        (SAMPLES, [*read_twice(ranks), *dealt_wrongly(ranks)]),
        (SCHEDULE, stepped_too_often(ranks)), (RANDOM, set_alike(ranks)),
        (METRICS, means_of_means(ranks, alone) if alone else ()),
        (OPTIMIZER, of_others(ranks)), (STATISTICS, evaluated_apart(ranks)),
        (STATES, put_back_wrongly(ranks)),
    ):  # fmt: skip
        for sentence in sentences:
            yield Finding(check, sentence, everyone)


def passes_of(ranks: Sequence[Ledger]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield each pass over a loader that all ranks made."""
    by_rank = [{(each["line"], each["turn"]): each for each in told["passes"]} for told in ranks]
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
            f" sampler pads them to a multiple of {size} ranks, and {first['reduced']} counts them; give each rank"
            " Subset(data, range(rank, len(data), world_size)), or leave out what is padded"
        )
        return


def dealt_wrongly(ranks: Sequence[Ledger]) -> Iterator[str]:
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
                f"each rank reads all {first['length']} samples {where}, in an order of its own: each counts"
                f" {len(parts)} times; give the loader a DistributedSampler"
            )
        elif twice > spare:
            yield (
                f"{counted(twice, 'samples')} {where} are in several ranks' parts of the data: give the loader a"
                " DistributedSampler, or parts that do not overlap"
            )
        elif missing > spare:
            yield (
                f"{counted(missing, 'samples')} {where} are in no rank's part of the {first['length']}: the parts leave"
                " them out, in every epoch"
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
                f"{kind} {whose} is stepped {size} times in each step of the optimizer ({stepped} times in {steps}"
                f" steps, {line}): the rate is at its end after 1/{size} of the run; step it once, since its length"
                " counts steps of the optimizer"
            )


def set_alike(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield a random state that all ranks take from one, if each had its own before, and that is then used."""
    if len(ranks) < 2 or not all(told["set"] for told in ranks):
        return
    for each in zip(*(told["set"] for told in ranks), strict=False):
        step, _, line = each[0]
        before = [told["states"][step - 1] for told in ranks if 0 < step <= len(told["states"])]
        later = [told["states"][step:] for told in ranks]
        drawn = all(len(set(states)) > 1 for states in later)
        alike = all(len(set(states)) == 1 for states in zip(*later, strict=False))
        if any(other[:2] != each[0][:2] for other in each) or len(set(before)) < len(ranks) or not (drawn and alike):
            continue
        yield (
            f"all ranks set one rank's random state at {line} after step {step - 1}, where each had its own before:"
            " from there on they draw the same numbers (dropout, noise) for other samples; save a state for each rank"
        )
        return


def of_others(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield an optimizer whose parameters get no gradient, while a model has others that do."""
    found = [told["strangers"] for told in ranks]
    steps = min(told["steps"] for told in ranks)
    if all(len(each) >= min(3, steps) > 0 and all(others for _, others, _ in each) for each in found):
        mine, others, line = found[0][0]
        yield (
            f"the optimizer's {counted(mine, 'parameters')} are not the model's: none has a gradient at {line}, and"
            f" {others} others do, which no optimizer steps; make the optimizer after the model is wrapped or sharded"
        )


def evaluated_apart(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield a model that ranks evaluate with different tensors, such as BatchNorm statistics, or a copy that one rank
    updates. If initial weights differed, as for slices, only statistics count."""
    begun_alike = len({tuple(sorted(told["first"].items())) for told in ranks}) == 1
    for each in zip(*(told["statistics"] for told in ranks), strict=False):
        steps, (first, *others) = {number for number, _, _ in each}, [states for _, states, _ in each]
        if len(steps) != 1 or any(set(other) != set(first) for other in others):
            continue
        apart = [name for name, state in first.items() if any(other[name] != state for other in others)]
        statistics = [name for name in apart if name.rpartition(".")[2] in RUNNING]
        where = f"evaluated at {each[0][2]}, after step {each[0][0] - 1}"
        if statistics:
            yield (
                f"running_mean and running_var differ between {name_ranks(list(range(len(ranks))))} where the model is"
                f" {where}: each has those of its own samples, so the"
                " ranks evaluate other models; average them over the ranks before, or broadcast rank 0's"
            )
            return
        if apart and begun_alike:
            yield (
                f"{and_more(apart)} differ between ranks where a model is {where}: the ranks evaluate other models;"
                " update it on every rank, or broadcast it before"
            )
            return


def put_back_wrongly(ranks: Sequence[Ledger]) -> Iterator[str]:
    """Yield an optimizer that gets back its own state on one rank and another's on others: each state is different, as
    when sharded, and the file has only rank 0's."""
    kept = [told["kept"] for told in ranks]
    if len({tuple((what, step) for what, step, _, _ in mine) for mine in kept}) > 1:
        return
    for index, (what, step, state, line) in enumerate(kept[0]):
        before = [place for place in range(index) if kept[0][place][0] == "saved" and kept[0][place][2] == state]
        if what != "loaded" or not before:
            continue
        odd = [
            rank for rank, mine in enumerate(kept)
            if mine[before[-1]][2] != state and mine[index][2] != mine[before[-1]][2]
        ]  # fmt: skip
        if odd:
            yield (
                f"the optimizer's state at {line} is not what {name_ranks(odd)} had when it was saved after step"
                f" {step - 1}, and rank 0's is: each rank has a state of its own, and has to save and load its own"
            )
            return


def means_of_means(ranks: Sequence[Ledger], alone: Ledger) -> Iterator[str]:
    """Yield a number that is the mean of the ranks' means, where one rank has the mean over all samples."""
    wanted = {(each["line"], each["turn"]): each for each in alone["metrics"]}
    by_rank = [{(each["line"], each["turn"]): each for each in told["metrics"]} for told in ranks]
    for key, right in wanted.items():
        mine = [each.get(key) for each in by_rank]
        told = [each for each in mine if each is not None and len(each["values"]) == len(right["values"])]
        read = [each["read"] for each in told]
        if len(told) < len(ranks) or not all(read) or max(read) == min(read) or right["step"] != told[0]["step"]:
            continue
        for index, value in enumerate(right["values"]):
            values = [each["values"][index] for each in told]
            total = sum(values)
            weighed = sum(count * each for count, each in zip(read, values, strict=True)) / sum(read)
            apart = min(abs(total / len(ranks) - value), abs(total - value))
            if abs(weighed - value) <= CLOSE * abs(value) <= apart / TIMES:
                yield (
                    f"what is reduced at {key[0]} is a mean of the ranks' means, {total / len(ranks):.6g}, where all"
                    f" samples have {value:.6g}: the ranks have {', '.join(map(str, read))} samples; sum the"
                    " sums and the counts, and divide after that"
                )
                return


def asked(ranks: Sequence[Ledger], alone: Sequence[Ledger], size: int) -> Iterator[str]:
    """Yield remarks on differences by design, or perhaps intended ones; they do not fail the proof."""
    first = ranks[0]
    if any(told["dropped"] for told in ranks):
        yield "dropout was off, on the ranks and in the reference"
    if any(told["normalised"] for told in ranks):
        yield (
            "BatchNorm normalises each rank's samples by themselves, as one rank with all of them would not: that is"
            " its nature, and the reference does so too"
        )
    for other in alone:
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
                yield f"the learning rate is not that of 1 rank in all steps: its schedule counts by the {size} ranks"
