"""`Ledger`: records in the script's process what a rerun cannot show.

These are random states by step, learning rates, schedules, other reduced values, the statistics that a model is
evaluated with, and whether the optimizer has the model's parameters.
"""

import gc
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distlab.lab.measure.tensors import hash_of
from distlab.tools.check.watch.patches import Function, Patch, after, before, harmless, hook, put, step_hook
from distlab.tools.check.watch.recorder import Call, Group
from distlab.tools.check.watch.replicas import checksum, parameters
from distlab.tools.prove.locate import plain_name
from distlab.tools.prove.script_samples import Samples
from distlab.tools.prove.script_steps import ScriptSteps

MOST_METRICS, MOST_VALUES = 200, 16
MOST_STATES = 10_000
MOST_EVALUATIONS = 100
FIRST = 3  # steps in which an optimizer without gradients is examined
LENGTHS = ("total_steps", "total_iters", "T_max")  # of a schedule
REDUCING = ("all_reduce", "reduce", "all_gather", "gather")


class Ledger:
    """The ledger of this process; `install` once, `write` at its end."""

    def __init__(self, steps: ScriptSteps, samples: Samples) -> None:
        self.steps, self.samples, self.recorder = steps, samples, steps.recorder
        self._states: list[int] = []
        self._set: list[list[Any]] = []
        self._schedules: dict[int, list[Any]] = {}
        self._metrics: list[dict[str, Any]] = []
        self._turns = Counter[str]()
        self._statistics: list[list[Any]] = []
        self._evaluated = set[tuple[int, int]]()
        self._optimizer_states: list[list[Any]] = []
        self._strangers: list[list[Any]] = []
        self._normalised = self._dropped = self._gathered = ""

    def install(self) -> None:
        from torch.optim.lr_scheduler import LRScheduler
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(step_hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))
        self.recorder.on_call.append(self._on_call)
        self.recorder.at_end.append(self.write)
        self.steps.on_evaluation.append(self._on_evaluation)
        put(
            Patch(torch, "set_rng_state", before(self._on_set_rng_state)),
            Patch(torch.random, "set_rng_state", before(self._on_set_rng_state)),
            Patch(LRScheduler, "step", after(self._on_schedule_step)),
            Patch(torch.optim.Optimizer, "state_dict", after(self._on_state_dict)),
            Patch(torch.optim.Optimizer, "load_state_dict", after(self._on_load_state_dict)),
            Patch(nn.functional, "batch_norm", self._batch_norm),
            Patch(nn.functional, "scaled_dot_product_attention", self._attention),
            *(Patch(nn.functional, name, self._dropout) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")),
        )

    # Functions of a model

    def _dropout(
        self, function: Function, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False  # noqa: A002
    ) -> Tensor:  # fmt: skip
        """Drop nothing, but advance the random generator as usual."""
        if not training or p == 0:
            found: Tensor = function(input, p, training, inplace)
            return found
        self._dropped = "dropout"
        function(input.detach(), p, True)
        return input

    def _attention(
        self, function: Function, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, *rest: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        self._dropped = "dropout" if dropout_p else self._dropped
        found: Tensor = function(query, key, value, attn_mask, 0.0, *rest, **named)
        return found

    def _batch_norm(
        self, function: Function, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,  # noqa: A002
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, *rest: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        """Normalise each rank's samples separately in the reference, as on the ranks."""
        chunks = self.samples.replay.chunks if self.samples.replay else []
        if training:
            self._normalised = "BatchNorm"
        if not training or len(chunks) < 2 or sum(chunks) != len(input):
            found: Tensor = function(input, running_mean, running_var, weight, bias, training, *rest, **named)
            return found
        parts = input.split(chunks)
        own = [function(each, running_mean, running_var, weight, bias, True, *rest, **named) for each in parts]
        return torch.cat(own)

    @harmless
    def _on_evaluation(self, model: nn.Module) -> None:
        """Record checksums of a model's tensors when it is first evaluated after a backward pass."""
        known = self.steps.all_backwards, id(model)
        if known in self._evaluated or not self.steps.all_backwards or len(self._evaluated) > MOST_EVALUATIONS:
            return
        self._evaluated.add(known)
        named = [*model.named_parameters(), *model.named_buffers()]
        sums = {plain_name(name): hash_of(each.detach()) for name, each in named if not hasattr(each, "_local_tensor")}
        if sums:
            self._statistics.append([self.steps.number, sums, self.recorder.places.line_of(3)])

    @harmless
    def _record_state(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Record a checksum of an optimizer's state when it is saved or loaded."""
        if len(self._optimizer_states) < MOST_METRICS:
            self._optimizer_states.append([what, self.steps.number, checksum(tensors), self.recorder.places.line_of(3)])

    def _on_state_dict(self, found: Any, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:  # noqa: ARG002
        self._record_state("saved", states_of(optimizer))

    def _on_load_state_dict(self, found: Any, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:  # noqa: ARG002
        self._record_state("loaded", states_of(optimizer))

    # Calls

    @harmless
    def _on_call(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:  # noqa: ARG002
        """Record what a script itself reduces: tensors gathered in a forward pass, and numbers."""
        if not call.by_script or call.op not in REDUCING or call.parameter is not None:
            return
        line = self.recorder.places.line_of(3)
        if call.op == "all_gather" and torch.is_grad_enabled() and any(each.numel() > 1 for each in call.tensors):
            self._gathered = self._gathered or line
        for each in self.samples.passes:
            if not each["trains"] and not each["reduced"] and self.steps.all_backwards == each["begun"]:
                each["reduced"] = line
        (first, *more) = call.tensors or (None,)
        if call.op == "all_reduce" and first is not None and not more and first.numel() <= MOST_VALUES:
            if len(self._metrics) < MOST_METRICS and len(group.ranks) == torch.distributed.get_world_size():
                values = first.detach().double().flatten().tolist()
                found = {"line": line, "turn": self._turns[line], "values": values, "step": self.steps.number}
                self._metrics.append(found | {"read": self.samples.read_since()})
            self._turns[line] += 1

    @harmless
    def _on_set_rng_state(self, state: Tensor, *_: Any, **__: Any) -> None:
        if len(self._set) < FIRST:
            self._set.append([self.steps.number, hash_of(state), self.recorder.places.line_of(3)])

    @harmless
    def _on_schedule_step(self, _: Any, schedule: Any, *__: Any, **___: Any) -> None:
        """Record a schedule's class, its steps, its length if known, and where it is stepped; its creation does not
        count as a step."""
        known = self._schedules.get(id(schedule))
        line = "" if known is None else known[3] or self.recorder.places.line_of(3)
        lengths = [getattr(schedule, name) for name in LENGTHS if isinstance(getattr(schedule, name, None), int)]
        record = [type(schedule).__name__, int(schedule.last_epoch), lengths[0] if lengths else 0, line]
        self._schedules[id(schedule)] = record

    # Steps

    @harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.steps.number <= FIRST and all(each.grad is None for each in parameters(optimizer)):
            mine = {id(each) for each in parameters(optimizer)}
            modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
            others = {
                id(each): name for module in modules if "_parameters" in module.__dict__
                for name, each in module.named_parameters() if each.grad is not None and id(each) not in mine
            }  # fmt: skip
            self._strangers.append([len(mine), len(others), self.recorder.places.line_of(2)])

    @harmless
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ARG002
        if len(self._states) < MOST_STATES:
            self._states.append(zlib.crc32(torch.get_rng_state().numpy().tobytes()))

    @harmless
    def write(self) -> None:
        """Write the records at the end, or when the reference stops."""
        records = {
            "passes": self.samples.passes, "lengths": self.samples.lengths, "rates": self.steps.rates,
            "steps": self.steps.number, "states": self._states, "set": self._set, "metrics": self._metrics,
            "schedules": [each for each in self._schedules.values() if each[3]],
            "statistics": self._statistics, "strangers": self._strangers, "normalised": self._normalised,
            "dropped": self._dropped, "gathered": self._gathered, "kept": self._optimizer_states,
            "names": list(self.steps.parameters), "first": self.steps.first,
        }  # fmt: skip
        (self.steps.settings.own_folder / "ledger.json").write_text(json.dumps(records))


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state, in the order of its parameters."""
    states = [optimizer.state.get(each, {}) for each in parameters(optimizer)]
    return [state[name] for state in states for name in sorted(state) if isinstance(state[name], Tensor)]
