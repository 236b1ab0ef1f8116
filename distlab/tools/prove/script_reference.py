"""The same script on one rank: it starts with the ranks' weights, reads all their samples, and stops where they did.

After each step it continues from the ranks' weights, so each step is compared separately: a difference in a later step
comes from that step.
"""

import json
import os
import sys
import threading
from typing import Any

import torch

from distlab.tools.check.watch.patches import harmless, hook, step_hook
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.reporter import now
from distlab.tools.prove.locate import Place, places_of
from distlab.tools.prove.script_ledger import Ledger
from distlab.tools.prove.script_samples import RecordedBatches, Samples
from distlab.tools.prove.script_steps import ProofSettings, ScriptSteps

RANKS = "ranks"  # the role of the proven processes


def watch(recorder: Recorder, settings_json: str) -> None:
    """Record a script's process, and make it the reference if it has that role."""
    settings = ProofSettings(**json.loads(settings_json))
    steps = ScriptSteps(recorder, settings)
    replay = None
    if settings.role != RANKS:
        folders = [settings.folder_of(RANKS, rank) for rank in range(settings.world_size)]
        replay = RecordedBatches(folders, (settings.rank, settings.reference_size), reordered=settings.role == "noise")
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    if settings.double:
        torch.set_default_dtype(torch.float64)
    steps.install()
    samples = Samples(steps, replay)
    samples.install()
    ledger = Ledger(steps, samples)
    ledger.install()
    if replay is not None:
        Reference(steps, ledger).install()
    imported: Any = sys.modules["distlab"]  # by the script
    imported.batch = samples.batch


class Reference:
    """The reference in this process; `install` once, after `ScriptSteps`."""

    def __init__(self, steps: ScriptSteps, ledger: Ledger) -> None:
        self.steps, self.recorder, self._ledger = steps, steps.recorder, ledger
        ranks = range(steps.settings.world_size)
        self._folders = [steps.settings.folder_of(RANKS, rank) for rank in ranks]
        self._recorded = min(len(list(each.glob("step-*.pt"))) for each in self._folders)
        self._first: list[dict[str, Any]] = [{} for _ in ranks]  # the first weights of each rank
        self._after: list[list[dict[str, Any]]] = []  # by step, per rank
        self._places: list[dict[str, Place]] = [{} for _ in ranks]

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        for number in range(self._recorded):
            found = [torch.load(each / f"step-{number}.pt", weights_only=True) for each in self._folders]
            for first, each in zip(self._first, found, strict=True):
                first.update({name: piece for name, piece in each["before"].items() if name not in first})
            self._after.append([each["after"] for each in found])
        self.steps.most = self._recorded
        self.steps.on_model.append(self._begin)
        self.steps.stop = self._stop
        register_optimizer_step_pre_hook(step_hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))

    @harmless
    def _begin(self) -> None:
        """Find the ranks' parts in a new model, and load their weights."""
        dense = {name: local_of(each).detach() for name, each in self.steps.parameters.items()}
        self._places = [places_of(first, dense) for first in self._first]
        self._load(self._first)

    def _load(self, pieces: list[dict[str, Any]]) -> None:
        with torch.no_grad():
            for places, mine in reversed(list(zip(self._places, pieces, strict=True))):
                for name, (_, _, tensor) in mine.items():
                    if name in places:
                        places[name].put(local_of(self.steps.parameters[places[name].name]).data, tensor)

    def _before_step(self, *_: Any) -> None:
        if self.steps.number >= self._recorded:
            self._stop()

    @harmless
    def _after_step(self, *_: Any) -> None:
        self._load(self._after[self.steps.number - 1])

    def _stop(self) -> None:
        """Stop the reference, which has done enough; ranks that wait for this one in a call end with it."""
        self._ledger.write()
        sys.stdout.flush()
        self.recorder.reporter.send("ended", 0, now())
        threading.Event().wait()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
