"""Our pipeline against PyTorch's: `python -m benchmarks.pp [ROUNDS]`.

4 ranks take whole steps of 8 microbatches that pretend 30 ms of compute each, 10 forward and 20 backward, so that two
cores are enough to show four stages at work. The model is 8 linear layers, since what real layers take is everybody's:
`alone` are the stages without a message. What sleeps wakes up on a cold core, which is most of the CPU time then;
"awake" are the same steps without pretended compute. Figures are times over torch_1f1b's: below 1 is better. The
bubble is what the ranks idle between the first forward and the last backward; activations are what autograd holds on
rank 0 for a GPT of 8 layers, at most.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rounds import Ratio, Timing, interleave, on_ranks, ratios, table
from distlab.contract import Strategy, replaced
from distlab.experiments import pp
from distlab.lab.config import Config
from distlab.lab.measure.storages import SavedActivations
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import Model, build_model
from distlab.lab.workload.user_model import SummedLoss
from distlab.techniques.collectives.phases import COMPUTE, Span, recorded
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.pipeline_parallel.costs import idle_share
from distlab.techniques.pipeline_parallel.pipeline import Boundaries
from distlab.techniques.pipeline_parallel.schedules import Action, one_forward_one_backward, split_backwards

RANKS, MICROBATCHES, CHUNKS = 4, 8, 2
BUBBLE_TARGET, ACTIVATIONS_TARGET = 0.03, 0.55
TIMES = {("zb_h1", "torch_interleaved_zb"): 0.90, ("zb_h1", "torch_1f1b"): 0.82}  # of a step, ours over PyTorch's


class Seen(NamedTuple):
    """What one variant took, idled and held."""

    timing: Timing
    awake: Timing  # without pretended compute
    bubbles: list[float]
    activation_bytes: int  # on rank 0


class Alone(Boundaries):
    """No messages: a stage takes zeros of the right shape, and its results go nowhere."""

    def receive_for(self, action: Action) -> Tensor:
        return self._buffer(action).zero_()

    def send_result(self, action: Action, tensor: Tensor) -> None:
        """Lose it."""

    def _post_ahead(self) -> None:
        """Nothing comes."""


def alone(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The stages of 1f1b with backward passes in two, without its messages."""
    schedule = [
        split_backwards(actions) for actions in one_forward_one_backward(config.world_size, config.num_microbatches)
    ]
    with replaced(vars(pp), {"schedule_of": lambda *_: schedule}):
        strategy: Any = pp.by_hand(model, mesh, config, name="1f1b")
    strategy.engine.pipeline.boundaries.__class__ = Alone
    return strategy  # type: ignore[no-any-return]


BUILDERS = {each.name: each.build for each in pp.MODE.requested(()).variants[1:] if each.build} | {"alone": alone}


def settings(**sizes: str) -> Config:
    """Two layers a rank, and 8 microbatches."""
    shape = {"RUN_MODE": "pp", "WORLD_SIZE": str(RANKS), "LAB_DEPTH": "8", "LAB_MICROBATCHES": str(MICROBATCHES)}
    return Config.read(shape | {"LAB_BATCH": str(MICROBATCHES)} | sizes)


def measure(group: dist.ProcessGroup, rounds: int) -> dict[str, Seen]:
    """Whole steps of each variant, interleaved, with their phases; then what each holds of real layers."""
    awake, sleeping = (
        settings(LAB_MODEL="mlp", LAB_WIDTH="64", LAB_BATCH="64", LAB_SLEEP_MS=sleep_ms) for sleep_ms in ("0", "10")
    )
    real = settings(LAB_WIDTH="64", LAB_SEQ="32")
    marks: dict[str, list[list[Span]]] = {name: [] for name in BUILDERS}
    steps = {name: step_of(name, group, sleeping, thin_model(sleeping), marks[name]) for name in BUILDERS}
    timings = interleave(steps, group, rounds)
    waking = {name: step_of(name, group, awake, thin_model(awake), []) for name in BUILDERS}
    timings_awake = interleave(waking, group, 4 * rounds)
    bubbles = {name: [idle(group, spans) for spans in marks[name][1:]] for name in BUILDERS}
    held_bytes = {name: held(step_of(name, group, real, build_model(real, 1), [])) for name in BUILDERS}
    return {name: Seen(timings[name], timings_awake[name], bubbles[name], held_bytes[name]) for name in BUILDERS}


def thin_model(config: Config) -> Model:
    """Two linear layers a rank."""
    model = Model("mlp", [nn.Linear(config.width, config.width) for _ in range(config.depth)], SummedLoss())
    model.initialise(config.seed)
    return model


def step_of(
    name: str, group: dist.ProcessGroup, config: Config, model: Model, marks: list[list[Span]]
) -> Callable[[], None]:
    """A step of one variant that notes its phases in `marks`."""
    microbatches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32).microbatches(0, 0, 1)
    strategy = BUILDERS[name](model, Mesh({"pp": group}), config)

    def step() -> None:
        with recorded() as spans:
            strategy.backward(microbatches)
            strategy.update()
        marks.append(spans)

    return step


def idle(group: dist.ProcessGroup, spans: list[Span]) -> float:
    """The part of all ranks' time in one step that none computes; ranks of one machine share a clock."""
    computing = [span for span in spans if span.kind in COMPUTE]
    ends = torch.tensor([-computing[0].start_s, computing[-1].end_s], dtype=torch.float64)
    busy = torch.tensor([sum(span.end_s - span.start_s for span in computing)], dtype=torch.float64)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(busy, group=group)
    return 1 - busy.item() / (group.size() * ends.sum().item())


def held(step: Callable[[], None]) -> int:
    """Bytes that autograd holds at most during a step."""
    with SavedActivations() as saved:
        step()
    return saved.peak_bytes


def main(rounds: int = 15) -> None:
    """Print the table, and the targets beside what they ask for."""
    seen: dict[str, Seen] = on_ranks(RANKS, measure, rounds)
    (torchs, torchs_awake, *_), rows = seen["torch_1f1b"], []
    for name, (timing, awake, bubbles, activation_bytes) in seen.items():
        wall, cpu = ratios(timing, torchs)
        formula = predicted_idle(name)
        idled = "-" if formula is None else f"{statistics.median(bubbles):.3f} ({formula:.3f})"
        row = [f"{timing.median_s * 1e3:.0f}", wall, f"{statistics.median(timing.cpu_s) * 1e3:.0f}", cpu, idled]
        rows.append([name, *row, f"{activation_bytes / 1e6:.2f}", *ratios(awake, torchs_awake)])
    print(f"{RANKS} ranks, {MICROBATCHES} microbatches of 30 ms: a step's time over torch_1f1b's (median, middle half)")
    columns = [
        "variant",
        "ms a step",
        "wall",
        "CPU ms",
        "CPU",
        "bubble (formula)",
        "activations MB",
        "awake: wall",
        "CPU",
    ]
    print(table(columns, rows))
    print(table(["figure", "", "target", "held"], targets(seen)))


def predicted_idle(name: str) -> float | None:
    """The idle share of the formula; None of a variant that has none."""
    plain = name.removeprefix("torch_")
    if name == "alone" or plain == "interleaved_zb":
        return None
    return idle_share(plain, RANKS, MICROBATCHES, CHUNKS)


def targets(seen: dict[str, Seen]) -> list[list[str]]:
    """What ours are to reach: figure, target, and whether it holds."""
    figures: dict[str, tuple[float, float]] = {}
    for (name, torchs), limit in TIMES.items():
        ours, theirs = (seen[each].timing.wall_s for each in (name, torchs))
        figures[f"{name}: wall over {torchs}'s"] = Ratio.of(ours, theirs).median, limit
    for name in ("1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"):
        over = statistics.median(seen[name].bubbles) - (predicted_idle(name) or 0.0)
        figures[f"{name}: bubble over the formula"] = over, BUBBLE_TARGET
    held_bytes = [seen[name].activation_bytes for name in ("1f1b", "gpipe")]
    figures["1f1b: activations over gpipe's"] = held_bytes[0] / held_bytes[1], ACTIVATIONS_TARGET
    return [
        [what, f"{figure:.3f}", f"{limit:.2f}", "yes" if round(figure, 3) <= limit else "NO"]
        for what, (figure, limit) in figures.items()
    ]


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
