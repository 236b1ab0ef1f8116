"""Silent corruption: find the rank whose gradient or weight differs from the other replicas.

A bit that flips in memory or in a processor raises no error, and training continues with it. But replicated tensors
must be equal on all their ranks, to the bit. So every LAB_AUDIT_EVERY steps each rank hashes its replicated tensors
(`Strategy.alike`): the gradients after their sum, the weights after the update. Rank 0 compares the hashes. With three
or more ranks the one that differs is named by majority; with two it is only known that they differ.

Tensors that are not replicated are not compared: slices of tp, layers of a stage of pp, shards of fsdp; nor are
gradients before their sum, which differ between ranks, and a wrong sum is equal on all. Audits of sampled steps against
one process detect those (audit.py).
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import hash_of
from distlab.lab.report import records
from distlab.lab.report.units import counted, name_ranks

KINDS = ("gradients", "weights")  # in the order in which a fault spreads
CONTROL = "tests/lab/verify/test_silent_corruption.py::test_a_tensor_that_one_rank_never_hashes_is_missed"
LEAST = 2  # ranks that compare

Hashes = dict[str, int]  # of one rank, by '<kind>.<parameter>'


class Differing(NamedTuple):
    """The ranks whose tensor differs from the others': by `majority`, or all that have it if there is none."""

    label: str
    ranks: list[int]
    majority: bool

    def sentence(self, holders: list[int], step: int) -> str:
        kind, _, name = self.label.partition(".")
        what = f"{kind.removesuffix('s')} of {name} at step {step}"
        if self.majority:
            others = name_ranks([rank for rank in holders if rank not in self.ranks])
            return f"{name_ranks(self.ranks)} differs from {others} in the {what}"
        return f"{name_ranks(self.ranks)} differ in the {what}: there is no majority, so any of them may be wrong"


class Corruption:
    """The audits of some strategies in training. All ranks call every method, at the same steps.

    A weight that differs stays different, so it is reported once.
    """

    def __init__(self, lab: Lab, strategies: Mapping[str, object], every: int | None) -> None:
        self.lab, self.every = lab, every
        self.holders: dict[str, dict[str, list[int]]] = {}  # by variant, the ranks that have a parameter
        self.audits: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.wrong: Counter[str] = Counter()  # tensors that differed, or that a rank should have hashed and did not
        self.found: dict[str, str] = {}  # the first sentence of each variant
        self._known: dict[str, list[Differing]] = defaultdict(list)  # the reported ones of each variant
        self._hashes: Hashes = {}
        for name, strategy in strategies.items() if every is not None else ():
            self.holders[name] = self._replicated(name, strategy)

    def _replicated(self, name: str, strategy: object) -> dict[str, list[int]]:
        mine = [parameter for parameter, _ in replicated(strategy, "weights")]
        everyone = self.lab.exchange.everyone(f"replicated tensors of {name}", mine)
        names = dict.fromkeys(parameter for of_rank in everyone for parameter in of_rank)
        by_parameter = {each: [rank for rank, of_rank in enumerate(everyone) if each in of_rank] for each in names}
        shared = {each: ranks for each, ranks in by_parameter.items() if len(ranks) >= LEAST}
        if not shared:
            self.lab.say(f"{name}: no tensor is replicated on several ranks, so there is nothing to compare", "audit")
        return shared

    def due(self, name: str, step: int) -> bool:
        return self.every is not None and (step + 1) % self.every == 0 and bool(self.holders.get(name))

    def hash(self, kind: str, name: str, strategy: object, step: int) -> None:
        """Hash this rank's "gradients", after they are summed, or "weights", after the update."""
        if not self.due(name, step):
            return
        started = time.perf_counter()
        shared = self.holders[name]
        self._hashes |= {f"{kind}.{each}": hash_of(copy) for each, copy in replicated(strategy, kind) if each in shared}
        self.seconds[name] += time.perf_counter() - started

    def compare(self, name: str, step: int) -> None:
        """Report on rank 0 which ranks differ, from all hashes of this step."""
        if not self.due(name, step):
            return
        started = time.perf_counter()
        mine, self._hashes = self._hashes, {}
        everyone = self.gathered(name, mine)
        self.audits[name] += 1
        if everyone is not None:
            differing, missing = compare_hashes(everyone, self.holders[name])
            self.wrong[name] += len(differing) + missing
            new = [each for each in differing if each not in self._known[name]]
            if new:
                self._find(name, step, new)
            self._known[name] = [each for each in differing if each.label.startswith("weights")]
        self.seconds[name] += time.perf_counter() - started

    def gathered(self, name: str, mine: Hashes) -> Sequence[Hashes] | None:
        """Return all ranks' hashes, by rank, where they are compared; None elsewhere."""
        return self.lab.exchange.gather(f"hashes of {name}", mine)

    def _find(self, name: str, step: int, differing: list[Differing]) -> None:
        sentence = differing[0].sentence(self.holders[name][differing[0].label.partition(".")[2]], step)
        sentence += f", and in {len(differing) - 1} more" if len(differing) > 1 else ""
        self.found.setdefault(name, sentence)
        self.report(name, step, differing, sentence)

    def report(self, name: str, step: int, differing: list[Differing], sentence: str) -> None:
        """Log and record it, on the one rank that does."""
        (label, ranks, majority), more = differing[0], len(differing) - 1
        self.lab.say(f"{name}: {sentence}", "corrupt", all_ranks=True, at="quiet")
        self.lab.journal.write(records.Corrupted(name, step, label, ranks, majority, more))

    def decide(self) -> None:
        """Write on rank 0 one check per variant: nothing differed, and no hash was missing."""
        for name in self.audits if self.lab.rank == 0 else ():
            self.decide_one(name)

    def decide_one(self, name: str) -> None:
        """Write the check of a variant, as seen by this rank."""
        audits = self.audits[name]
        done = f"{counted(audits, 'audits')} of {len(self.holders[name])} replicated parameters"
        self.lab.say(f"{name}: {done}, {1000 * self.seconds[name] / audits:.1f} ms each", "audit")
        detail = self.found.get(name, done)
        self.lab.check("audited replicas", self.wrong[name], 0, variant=name, detail=detail, control=CONTROL)


def replicated(strategy: object, kind: str) -> list[tuple[str, Tensor]]:
    """Return this rank's replicated tensors; nothing if a strategy does not declare them."""
    of_kind = getattr(strategy, "alike", None)
    return list(of_kind(kind)) if of_kind is not None else []


def compare_hashes(everyone: Sequence[Hashes], holders: Mapping[str, list[int]]) -> tuple[list[Differing], int]:
    """Return the tensors that differ, gradients first, and the number of missing hashes: if one rank has hashed a
    tensor, all with its parameter must."""
    differing, missing = [], 0
    labels = dict.fromkeys(label for of_rank in everyone for label in of_rank)
    for kind in KINDS:
        for parameter, ranks in holders.items():
            label = f"{kind}.{parameter}"
            if label not in labels and kind == "gradients":
                continue  # gradients that differ by design, or a parameter without one
            found = {rank: everyone[rank][label] for rank in ranks if label in everyone[rank]}
            missing += len(ranks) - len(found)
            named = outliers(found)
            differing += [Differing(label, *named)] if named else []
    return differing, missing


def outliers(found: Mapping[int, int]) -> tuple[list[int], bool] | None:
    """Return the ranks whose hashes differ from the majority's; all, if there is no majority; None if all are equal."""
    ((most, count), *others) = Counter(found.values()).most_common() or [(0, 0)]
    if not others:
        return None
    if 2 * count > len(found):
        return sorted(rank for rank, value in found.items() if value != most), True
    return sorted(found), False
