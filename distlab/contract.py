"""The contract of a mode: what a lesson declares about itself, with working defaults for everything else.

    MODE = Mode(variants=(Variant("per_parameter", per_parameter), Variant("ddp", ddp, by_torch=True)))

is a complete mode: both variants are proven against one process, timed, counted and drawn. This object is all that the
lab knows about a mode, so modes outside of experiments/ work like the lab's own. An injected bug replaces a part of the
mode (`Mistakes`, `Instead`): the correct code never asks which bug is injected.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from distlab.lab.config import Config
from distlab.lab.config.settings import ModeOptions
from distlab.lab.measure.event_order import Order
from distlab.lab.measure.prediction import Prediction
from distlab.lab.measure.traffic import Traffic
from distlab.lab.workload import data
from distlab.lab.workload import model as models
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model, build_model, outline
from distlab.lab.workload.user_model import is_own


class Strategy(Protocol):
    """One way of training a model on many ranks.

    All its steps make the same calls, unless an attribute `repeats_after` gives the number of steps after which they
    repeat, 0 for never. Two members are optional:

        layers       this rank's layers by their number in the model: the order of their passes and gradients in a step
                     is then recorded (distlab/lab/measure/event_order.py)
        alike(kind)  yields names and tensors of those "gradients" or "weights" that this rank stores whole and that are
                     bitwise equal on all ranks with this name: they are then compared between ranks
                     (distlab/lab/verify/silent_corruption.py)
    """

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Run forward and backward of this rank's microbatches and synchronise the gradients, once per step.

        Returns this rank's part of the loss, detached: the parts of all ranks add up to the mean loss of the batch.
        None if the rank computes no loss.
        """

    def update(self) -> None:
        """Clip, and step the optimizer."""

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield dense "gradients", "weights" or "optimizer" state under dense names on rank 0, one at a time; a
        collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: 'weights.<name>' and 'optimizer.<key>.<name>', views of the live tensors.

        Names are dense; a value is a Tensor if this rank has all of it, a LocalShard or a DTensor if it has a part.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which `state_dict` returned and a checkpoint has filled in place."""


Build: TypeAlias = Callable[..., Strategy]  # (model, mesh, config)


@dataclass(frozen=True)
class Variant:
    """One column of a run: its name, and the function that makes its strategy on this rank; None if the mode's own
    `run` handles it."""

    name: str
    build: Build | None = None
    by_torch: bool = False  # whether it is PyTorch's own, for comparison with the others
    recomputes: bool = True  # whether LAB_RECOMPUTE applies to it; False if it recomputes in its own way
    timed_part: int = 1  # with other variants over gloo 1 of so many steps is timed (distlab/lab/verify/run_all.py)
    sentence: str = ""  # its description in the report; empty: the docstring of `build`
    formerly: str = ""  # an older name, which LAB_VARIANT also accepts
    by_name: bool = False  # whether it runs only if LAB_VARIANT names it
    like: str = ""  # a variant with the same bytes sent and stored, whose predictions and checks apply to this one too

    @property
    def description(self) -> str:
        """Return its description in one line; empty if there is none."""
        build: Any = self.build
        while isinstance(build, partial):
            build = build.func
        words = self.sentence or (inspect.getdoc(build) if build is not None else "") or ""
        return " ".join(words.split("\n\n")[0].split())


WHOLE_RUN = ("",)


@dataclass(frozen=True)
class Claims:
    """A row of a mode's table: required checks and comparisons, and a test that makes them fail.

    Each variant in `of` must make them so many `times`, on every rank or on `one`, if `when` is true; a missing one
    fails the run (distlab/lab/report/verdict.py). `fails_in` names a test in which they fail if no injected bug of the
    mode makes them fail: `tests/<file>::<test>`, or only the name of a test of the mode itself. A name that ends in a
    space stands for all names with this prefix.
    """

    names: Sequence[str]
    of: Sequence[str] = WHOLE_RUN
    one: bool = False
    times: int = 1
    when: bool = True
    fails_in: str = ""


@dataclass(frozen=True)
class Held:
    """How the timed steps of a variant are checked, if not by one process that takes the same steps.

    Held(why="sends only the largest gradients, so losses differ")        not at all: its losses are only shown
    """

    why: str = ""
    replicas: bool = True  # whether replicated weights are equal after the last step


@dataclass(frozen=True)
class Counted:
    """What one step of a variant sent from this rank, and its memory: bytes for the backward pass, and bytes by
    class."""

    traffic: Traffic
    activation_bytes: int
    rest: dict[str, int]  # bytes by class (distlab/lab/measure/memory.py) between two steps
    peak: dict[str, int]  # when their sum was largest
    most: dict[str, int] = field(default_factory=dict, kw_only=True)  # the peak of each class by itself
    order: Order  # of its events


@dataclass(frozen=True)
class Measured(Counted):
    """`Counted`, and the bubble of the timed steps: on rank 0, if the variant marks its passes."""

    bubble: float | None


Arrive: TypeAlias = Callable[[Path], None]
ShardsWritten: TypeAlias = Callable[[list[Path], Path, int], tuple[list[Path], Arrive]]


def all_there(files: list[Path], partial: Path, rank: int) -> tuple[list[Path], Arrive]:  # noqa: ARG001
    """Return a rank's checkpoint files at the moment when it reports them written: all, so that none has to arrive in
    the final folder later."""
    return files, lambda final: None  # noqa: ARG005


def where_it_was(batch: int) -> int:
    """Return the batch of the epoch with which a resumed run continues: the one in the checkpoint."""
    return batch


@dataclass(frozen=True)
class Instead:
    """The replacement of correct parts by an injected bug; None leaves a part unchanged.

    Instead(("flat",), {"GradientBuckets": StaleBuckets})    flat's module calls StaleBuckets so while flat is made
    Instead(run={"sampler_of": None})                        run(lab, sampler_of=None)
    """

    variants: Sequence[str] = ()  # which are made with other parts
    parts: Mapping[str, Any] = field(default_factory=dict)  # names in their maker's module, or its keyword arguments
    run: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the mode's own run
    batches: Callable[..., Batches] | None = None  # another dealing of samples
    shards_written: ShardsWritten | None = None  # of a checkpoint, see `all_there`
    resumed_batch: Callable[[int], int] | None = None  # see `where_it_was`


@dataclass(frozen=True)
class Needs:
    """The requirements of a run in which an injected bug can show."""

    ranks: int = 2
    proof: bool = True
    clip: bool = False
    saves: bool = False
    microbatches: int = 1
    variants: Sequence[str] = ()  # those that can have the bug, if `Instead.variants` is empty; empty: all
    # Why these settings hide it, such as `WORLD_SIZE=1: it takes two`.
    unless: Callable[[Config], str] = lambda config: ""  # noqa: ARG005


@dataclass(frozen=True)
class Mistake:
    """A classic mistake that LAB_BUG injects: what breaks, the check that catches it, the replaced parts, and the
    requirements."""

    what: str
    check: str
    where: Instead
    needs: Needs = Needs()

    def hidden(self, mode: "Mode", config: Config) -> str:
        """Return why no check of this run can catch it, to follow "cannot be detected with"; empty if one can."""
        needs, makers = self.needs, list(self.where.variants or self.needs.variants)
        impossible = mode.cannot(config)
        chosen = [name for name in makers if not config.variant or name in config.variant]
        missing = "; ".join(f"{name} cannot run: {impossible[name]}" for name in chosen if name in impossible)
        reasons = [
            (needs.proof and not config.proof, "LAB_PROOF=0: nothing is compared"),
            (config.world_size < needs.ranks, f"WORLD_SIZE={config.world_size}: it takes {needs.ranks} ranks"),
            (needs.clip and config.clip is None, "LAB_CLIP unset: nothing is clipped"),
            (needs.saves and config.checkpoint_every is None, "LAB_CHECKPOINT_EVERY unset: nothing is saved"),
            (
                needs.saves and (config.checkpoint_every or 0) > config.steps,
                "LAB_CHECKPOINT_EVERY above LAB_STEPS: nothing is saved",
            ),
            (
                config.num_microbatches < needs.microbatches,
                f"LAB_MICROBATCHES={config.num_microbatches}: it takes {needs.microbatches} microbatches",
            ),
            (bool(makers) and not chosen, f"these variants: it takes {' or '.join(makers)}"),
            (bool(chosen) and set(chosen) <= set(impossible), f"these settings: {missing}"),
        ]
        return next((reason for applies, reason in reasons if applies), "") or needs.unless(config)


Wrong = TypeVar("Wrong")
IN_THE_PASSES = ("batches", "shards_written", "resumed_batch")


def itself(wrong: Any) -> Any:
    return wrong


class Mistakes(dict[str, Mistake]):
    """The injected bugs of a mode by name, each declared at the wrong part, whose docstring says what breaks.

    mistake = Mistakes()

    @mistake("stale_bucket", check="gradients", part="GradientBuckets", of=("flat", "bucketed"), needs=Needs(ranks=1))
    class StaleBuckets(GradientBuckets):
        '''The buckets are not emptied between steps: each gradient has all former ones in it.'''
    """

    def __call__(
        self, name: str, *, check: str, part: str, of: Sequence[str] = (), needs: Needs = Needs(),
        put: Callable[[Any], Any] = itself,
    ) -> Callable[[Wrong], Wrong]:  # fmt: skip
        """Decorate the replacement of a part for LAB_BUG=`name`; returns it unchanged.

        Args:
            check: the check that catches it.
            part: a name in the module that makes the variants `of`; without `of` a keyword argument of the mode's own
                run; or a field of the Mode: batches, shards_written or resumed_batch.
            needs: requirements of a run in which it shows.
            put: turns the decorated object into the value of the part.
        """

        def stated(wrong: Wrong) -> Wrong:
            parts = {part: put(wrong)}
            if part in IN_THE_PASSES:
                where = Instead(**parts)
            elif of:
                where = Instead(of, parts)
            else:
                where = Instead(run=parts)
            self[name] = Mistake(sentence_on(wrong) or name, check, where, needs)
            return wrong

        return stated


def sentence_on(wrong: object) -> str:
    """Return the first paragraph of its docstring, to follow a colon."""
    words = " ".join(inspect.cleandoc(wrong.__doc__ or "").partition("\n\n")[0].split())
    return words[:1].lower() + words[1:].removesuffix(".")


def made_with(make: Callable[..., Strategy], parts: Mapping[str, Any]) -> Callable[..., Strategy]:
    """Return the same maker with `parts` in place of the names in its module; a part without a name there becomes a
    keyword argument, for modes outside of the lab."""
    maker: Any = make
    while isinstance(maker, partial):
        maker = maker.func
    keywords = {name: part for name, part in parts.items() if name not in maker.__globals__}
    names = {name: part for name, part in parts.items() if name not in keywords}

    @wraps(maker)
    def made(*args: Any, **kwargs: Any) -> Strategy:
        with replaced(maker.__globals__, names):
            return make(*args, **keywords, **kwargs)

    return made


@contextmanager
def replaced(names: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Replace names of a module, given as `vars(module)`, by `others` inside the block."""
    kept = {name: names[name] for name in others}
    names.update(others)
    try:
        yield
    finally:
        names.update(kept)


def trained(config: Config) -> str:
    """Return a description of the model, for headings."""
    return outline(config).describe()


def untrainable(config: Config, num_shards: int | None = None) -> list[str]:
    """Return reasons why no model of these sizes can be trained on batches in `num_shards` shards (default: one per
    rank)."""
    shards = config.world_size if num_shards is None else num_shards
    return models.refusals(config) + data.refusals(config, shards) + data.text_refusals(config)


def ruled_out(*reasons: tuple[Iterable[str], object, str]) -> dict[str, str]:
    """Return for each variant the first reason that applies; a reason is (the variants, whether it applies, why)."""
    found: dict[str, str] = {}
    for names, applies, why in reasons:
        for name in names if applies else ():
            found.setdefault(name, why)
    return found


def untrained(config: Config) -> list[str]:
    """Return a sentence if a user's model is set in a mode that trains no model."""
    if not is_own(config.model):
        return []
    return [f"LAB_MODEL={config.model!r}: {config.mode_name} trains nothing, so run it in dp, fsdp or pp"]


@dataclass(frozen=True)
class Mode:
    """A mode; every field has a working default."""

    idea: str = ""  # the docstring of its lesson, filled in when it is loaded
    variants: tuple[Variant, ...] = ()  # in reading order, the simplest first
    run: Callable[[Any], None] | None = None  # with a lab.Lab; None: measure all variants and compare with `predict`
    model: Callable[[Config, int], Model] = build_model  # the dense model of a seed, in float32 on the CPU
    more_parameters: Callable[[Config], float] = lambda config: 0.0  # noqa: ARG005  than LAB_MODEL, to estimate memory
    title: Callable[[Config], str] = trained
    options: type[ModeOptions] = ModeOptions  # its own variables, and defaults of common variables that differ
    axes: Callable[[Config], dict[str, int]] = lambda config: {"dp": config.world_size}  # batches are split along "dp"
    predict: Callable[[Config], list[Prediction]] = lambda config: []  # noqa: ARG005
    refuse: Callable[[Config], list[str]] = untrainable
    # The variants that these settings exclude, and why.
    cannot: Callable[[Config], Mapping[str, str]] = lambda config: {}  # noqa: ARG005
    # Its table of checks, including those of the passes; None: only those of the passes, without its own `run`.
    claims: Callable[["Mode", Config], Sequence[Claims]] | None = None
    mistakes: Mapping[str, Mistake] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)  # removed variants and bugs, and what to use instead
    headline: tuple[str, str] = ("", "")  # the variant that a rank's log shows, and what the rank does in it
    unsaved: str = ""  # why it makes no checkpoints, such as `trains nothing`; empty if it does
    shards: bool = False  # whether all ranks of a variant together store one copy of the training state
    at_once: int = 0  # the number of simultaneous trainings, if these are not its variants
    stepped: bool = False  # whether it trains by itself, and calls Lab.begin_step
    takes_back: bool = False  # whether a restarted rank rejoins the run (distlab/lab/cluster/rejoin.py)
    recomputes: bool = False  # whether its ranks run whole layers, which LAB_RECOMPUTE needs
    reading: tuple[str, ...] = ()  # the lesson's files in reading order, each with a description
    # For each injected bug that changes one line of lesson.py: the line, and its replacement.
    in_lesson: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # variants that run only by name, and were not requested
    # Parts of the passes that an injected bug may replace.
    batches: Callable[..., Batches] = Batches
    shards_written: ShardsWritten = all_there
    resumed_batch: Callable[[int], int] = where_it_was

    @property
    def names(self) -> tuple[str, ...]:
        """Return its variants' names, in reading order."""
        return tuple(variant.name for variant in self.variants)

    @property
    def formerly(self) -> dict[str, str]:
        """Return the variants' current names by their older ones."""
        return {variant.formerly: variant.name for variant in self.variants if variant.formerly}

    @property
    def by_torch(self) -> tuple[str, ...]:
        """Return the variants that are PyTorch's own."""
        return tuple(variant.name for variant in self.variants if variant.by_torch)

    @property
    def by_hand(self) -> tuple[str, ...]:
        """Return the lesson's own variants that the passes train, without PyTorch's and the user's."""
        return tuple(each.name for each in self.variants if each.build and not each.by_torch and not is_own(each.name))

    @property
    def sentence(self) -> str:
        """Return its idea in one sentence, for the first line of a log."""
        return " ".join(self.idea.split("\n\n")[0].split())

    @property
    def stories(self) -> dict[str, str]:
        """Return what a rank does in each variant."""
        return {each.name: each.description for each in self.variants} | dict([self.headline])

    @property
    def timed(self) -> bool:
        """Return whether the training of any variant is timed by itself."""
        return any(variant.build is not None for variant in self.variants)

    @property
    def audits(self) -> bool:
        """Return whether its ranks train, so that replicated tensors can be audited."""
        return self.timed or self.stepped or bool(self.at_once)

    def all_predictions(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """Return the predictions of its variants, with copies for variants that are `like` another and have none."""
        own = {(each.variant, each.name) for each in predictions}
        like = [(variant.name, variant.like) for variant in self.variants if variant.like]
        copied = [replace(each, variant=name) for name, other in like for each in predictions if each.variant == other]
        known = [each for each in predictions if each.variant not in self.left_out]
        return [*known, *(each for each in copied if (each.variant, each.name) not in own)]

    def with_like(self, names: Sequence[str]) -> list[str]:
        """Return these variants, and those that are `like` one of them."""
        return [
            *names,
            *(each.name for each in self.variants if each.like and each.like in names and each.name not in names),
        ]

    def requested(self, names: Sequence[str]) -> "Mode":
        """Return the mode without variants that run only by name and are not in `names`."""
        left_out = tuple(each.name for each in self.variants if each.by_name and each.name not in names)
        kept = tuple(each for each in self.variants if each.name not in left_out)
        return replace(self, variants=kept, left_out=left_out)

    def mistake_record(self, bug: str | None) -> dict[str, str]:
        """Return the record of the injected bug `bug`; empty if there is none."""
        made = self.mistakes.get(bug or "")
        return {"name": bug or "", "what": made.what, "check": made.check} if made else {}

    def mistaken(self, bug: str | None) -> "Mode":
        """Return the mode with the bug `bug` injected, if it has it."""
        if bug is None or bug not in self.mistakes:
            return self
        where = self.mistakes[bug].where
        others = {name: getattr(where, name) for name in IN_THE_PASSES if getattr(where, name) is not None}
        made = tuple(
            (
                replace(each, build=made_with(each.build, where.parts))
                if each.build and each.name in where.variants
                else each
            )
            for each in self.variants
        )
        run = partial(self.run, **where.run) if self.run is not None and where.run else self.run
        return replace(self, variants=made, run=run, **others)


# The names for users' own modes: `from distlab.contract import Mode, Variant`.

__all__ = ["Instead", "Mistake", "Mistakes", "Mode", "Needs", "Strategy", "Variant"]
