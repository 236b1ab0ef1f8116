"""The contract of a mode: what a lesson states about itself, with a default that works for all that it leaves out.

    MODE = Mode(variants=(Variant("per_parameter", per_parameter), Variant("ddp", ddp, by_torch=True)))

is a whole mode: both variants are proven against one process, timed, counted and drawn. Whatever the lab knows of a
mode it reads from this object, so a mode from outside of experiments/ is no different from ours. A mistake is a
substitution (`Mistakes`, `Instead`): the right path never asks which mistake is on.
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

    Its steps make the same calls, or it has an attribute `repeats_after`: the number of steps after which they repeat,
    0 where they never do. With an attribute `layers`, this rank's by their number in the model, its passes and
    gradients are seen in the order of a step (distlab/lab/measure/event_order.py). With a method `alike(kind)`, the
    names and tensors of the "gradients" or "weights" that this rank holds whole and that are the same, to the bit,
    wherever the name is held, these are compared between ranks (distlab/lab/verify/silent_corruption.py).
    """

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Forward and backward of this rank's microbatches, gradients synchronised, once a step.

        Returns this rank's share of the loss, detached: the shares of all ranks add up to the mean loss of the batch.
        None where a rank sees no loss.
        """

    def update(self) -> None:
        """Clip, and step the optimizer."""

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """A collective: dense "gradients", "weights" or "optimizer" state under dense names on rank 0, one at a
        time."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: 'weights.<name>' and 'optimizer.<key>.<name>', each a view of what is trained on.

        Dense names; a Tensor where this rank holds it whole, a Piece or a DTensor where it holds a part, none where
        nothing.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which `state_dict` gave and a checkpoint has filled in place."""


Build: TypeAlias = Callable[..., Strategy]  # (model, mesh, config)


@dataclass(frozen=True)
class Variant:
    """One column of a run: its name, and what makes its strategy on this rank; None where the mode's own `run` makes
    something of it."""

    name: str
    build: Build | None = None
    by_torch: bool = False  # PyTorch's own, which the others are held against
    recomputes: bool = True  # whether LAB_RECOMPUTE is for it, and not a way of its own to what its layers drop
    timed_part: int = 1  # beside others over gloo it takes one of so many timed steps (distlab/lab/verify/run_all.py)
    sentence: str = ""  # on it, for the report; empty: the docstring of what makes it
    formerly: str = ""  # a name that it had before, which LAB_VARIANT takes too
    by_name: bool = False  # whether it runs only where LAB_VARIANT names it
    like: str = ""  # the variant that sends and holds what it does: what is foretold and claimed of that holds for it

    @property
    def description(self) -> str:
        """The sentence on it, without its line breaks; empty where nobody wrote one."""
        build: Any = self.build
        while isinstance(build, partial):
            build = build.func
        words = self.sentence or (inspect.getdoc(build) if build is not None else "") or ""
        return " ".join(words.split("\n\n")[0].split())


WHOLE_RUN = ("",)


@dataclass(frozen=True)
class Claims:
    """A row of a mode's table: checks and comparisons by name, what makes them fail, and who has to make them.

    Each variant in `of`, so many `times`, by each rank or by `one`, `when` it is so: one that vanishes is missed
    (distlab/lab/report/verdict.py). `fails_in` is what makes them fail where no mistake of the mode is meant to, as
    `tests/<file>::<test>`, or of the mode's own tests its name. A check whose name ends in a space stands for all that
    begin so.
    """

    names: Sequence[str]
    of: Sequence[str] = WHOLE_RUN
    one: bool = False
    times: int = 1
    when: bool = True
    fails_in: str = ""


@dataclass(frozen=True)
class Held:
    """What the timed steps of a variant are held to, where that is not one process that takes the same steps.

    Held(why="leaves numbers out, so losses differ")        nothing: its losses are only shown
    """

    why: str = ""
    replicas: bool = True  # whether ranks that hold a weight whole hold the same numbers after the last step


@dataclass(frozen=True)
class Counted:
    """What one step of a variant sent from this rank, and what it held: bytes for the backward pass, and all by
    class."""

    traffic: Traffic
    activation_bytes: int
    rest: dict[str, int]  # bytes by class (distlab/lab/measure/memory.py) between two steps
    peak: dict[str, int]  # and when the step held most
    most: dict[str, int] = field(default_factory=dict, kw_only=True)  # and of each class when the step held most of it
    order: Order  # what happened in it


@dataclass(frozen=True)
class Measured(Counted):
    """`Counted`, and of the timed steps the bubble: on rank 0, where the variant marks its passes."""

    bubble: float | None


Arrive: TypeAlias = Callable[[Path], None]
ShardsWritten: TypeAlias = Callable[[list[Path], Path, int], tuple[list[Path], Arrive]]


def all_there(files: list[Path], partial: Path, rank: int) -> tuple[list[Path], Arrive]:  # noqa: ARG001
    """A rank's files of a checkpoint when it says that they are written: all, and nothing arrives in the final folder
    later."""
    return files, lambda final: None  # noqa: ARG005


def where_it_was(batch: int) -> int:
    """The batch of the epoch that a resumed run goes on with: the one that the checkpoint names."""
    return batch


@dataclass(frozen=True)
class Instead:
    """What takes the place of the right thing where a mistake is made; None leaves it as it is.

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
    """What a run has to have so that a mistake can show in it."""

    ranks: int = 2
    proof: bool = True
    clip: bool = False
    saves: bool = False
    microbatches: int = 1
    variants: Sequence[str] = ()  # those that can make it, where `Instead.variants` does not say so; empty: all
    # Why these settings hide it, as `WORLD_SIZE=1: it takes two`.
    unless: Callable[[Config], str] = lambda config: ""  # noqa: ARG005


@dataclass(frozen=True)
class Mistake:
    """A classic mistake that LAB_BUG makes on purpose: what breaks, the check that sees it, what is done instead, what
    it needs."""

    what: str
    check: str
    where: Instead
    needs: Needs = Needs()

    def hidden(self, mode: "Mode", config: Config) -> str:
        """Why no check of this run could see it, a phrase behind "cannot be detected with"; empty if one could."""
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
    """The mistakes of a mode by name, each stated at the wrong thing, whose docstring is the sentence on what breaks.

    mistake = Mistakes()

    @mistake("stale_bucket", check="gradients", part="GradientBuckets", of=("flat", "bucketed"), needs=Needs(ranks=1))
    class StaleBuckets(GradientBuckets):
        '''The buckets are not emptied between steps: each gradient has all former ones in it.'''
    """

    def __call__(
        self, name: str, *, check: str, part: str, of: Sequence[str] = (), needs: Needs = Needs(),
        put: Callable[[Any], Any] = itself,
    ) -> Callable[[Wrong], Wrong]:  # fmt: skip
        """Decorates what takes the place of a part where LAB_BUG is `name`; returns it as it is.

        Args:
            check: the check that sees it.
            part: a name in the module of the makers of the variants `of`; without `of` a keyword of the mode's own run;
                or a field of the Mode: batches, shards_written or resumed_batch.
            needs: what a run has to have so that it shows.
            put: makes of what is decorated what the part takes.
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
    """The first paragraph of its docstring, to go on with behind a colon."""
    words = " ".join(inspect.cleandoc(wrong.__doc__ or "").partition("\n\n")[0].split())
    return words[:1].lower() + words[1:].removesuffix(".")


def made_with(make: Callable[..., Strategy], parts: Mapping[str, Any]) -> Callable[..., Strategy]:
    """The same maker, which finds `parts` under their names in its module; is given those that have no name there by
    keyword, as a mode from outside of the lab may want it."""
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
    """Let names of a module, `vars(module)`, stand for `others` inside."""
    kept = {name: names[name] for name in others}
    names.update(others)
    try:
        yield
    finally:
        names.update(kept)


def trained(config: Config) -> str:
    """What is trained, for headings."""
    return outline(config).describe()


def untrainable(config: Config, num_shards: int | None = None) -> list[str]:
    """Sentences why no model of these sizes can be trained on batches dealt in `num_shards` parts, by default one a
    rank."""
    shards = config.world_size if num_shards is None else num_shards
    return models.refusals(config) + data.refusals(config, shards) + data.text_refusals(config)


def ruled_out(*reasons: tuple[Iterable[str], object, str]) -> dict[str, str]:
    """Of each variant the first reason that applies: (the variants, whether it applies, why)."""
    found: dict[str, str] = {}
    for names, applies, why in reasons:
        for name in names if applies else ():
            found.setdefault(name, why)
    return found


def untrained(config: Config) -> list[str]:
    """A sentence for a model of one's own where a mode trains none."""
    if not is_own(config.model):
        return []
    return [f"LAB_MODEL={config.model!r}: {config.mode_name} trains nothing, so run it in dp, fsdp or pp"]


@dataclass(frozen=True)
class Mode:
    """A lesson, as the lab sees it; every field has a default that works."""

    idea: str = ""  # the docstring of its lesson, which whoever loads it fills in
    variants: tuple[Variant, ...] = ()  # in reading order, the simplest first
    run: Callable[[Any], None] | None = (
        None  # on a lab.Lab; None: all variants are measured, and held against `predict`
    )
    model: Callable[[Config, int], Model] = build_model  # by a seed, in float32 on the CPU: what one process trains
    more_parameters: Callable[[Config], float] = lambda config: 0.0  # noqa: ARG005  than LAB_MODEL has, to foretell memory
    title: Callable[[Config], str] = trained
    options: type[ModeOptions] = ModeOptions  # its own variables, and sizes where its defaults differ
    axes: Callable[[Config], dict[str, int]] = lambda config: {"dp": config.world_size}  # the batch is dealt along "dp"
    predict: Callable[[Config], list[Prediction]] = lambda config: []  # noqa: ARG005
    refuse: Callable[[Config], list[str]] = untrainable
    # The variants that these settings rule out, and why.
    cannot: Callable[[Config], Mapping[str, str]] = lambda config: {}  # noqa: ARG005
    # Its table of checks, to which those of the passes belong; None: these where it has no `run` of its own.
    claims: Callable[["Mode", Config], Sequence[Claims]] | None = None
    mistakes: Mapping[str, Mistake] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)  # variants and bugs of before: what to use in their place
    headline: tuple[str, str] = ("", "")  # the variant that a rank's log tells, and what the rank does in it
    unsaved: str = ""  # why it makes no checkpoints, as `trains nothing`; empty where it does
    shards: bool = False  # whether all ranks of a variant together hold one copy of what is trained
    at_once: int = 0  # trainings beside each other, each of a stream of samples, where they are not its variants
    stepped: bool = False  # whether it trains by itself, and says when a step begins (Lab.begin_step)
    takes_back: bool = False  # whether a rank that is started again rejoins the run (distlab/lab/cluster/rejoin.py)
    recomputes: bool = False  # whether its ranks run whole layers, so that LAB_RECOMPUTE can run them again
    reading: tuple[str, ...] = ()  # the files of the lesson in the order in which they are read, each with what it has
    # Of each mistake that is one line of its lesson.py: the line, and what stands there instead.
    in_lesson: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # variants that run by name alone, where nobody named them
    # What a mistake may replace in the passes.
    batches: Callable[..., Batches] = Batches
    shards_written: ShardsWritten = all_there
    resumed_batch: Callable[[int], int] = where_it_was

    @property
    def names(self) -> tuple[str, ...]:
        """Its variants' names, in reading order."""
        return tuple(variant.name for variant in self.variants)

    @property
    def formerly(self) -> dict[str, str]:
        """The variants' names of before, each with the name that took its place."""
        return {variant.formerly: variant.name for variant in self.variants if variant.formerly}

    @property
    def by_torch(self) -> tuple[str, ...]:
        """The variants that are PyTorch's own."""
        return tuple(variant.name for variant in self.variants if variant.by_torch)

    @property
    def by_hand(self) -> tuple[str, ...]:
        """The lesson's variants that are trained by the passes and are not PyTorch's own; nor one's own."""
        return tuple(each.name for each in self.variants if each.build and not each.by_torch and not is_own(each.name))

    @property
    def sentence(self) -> str:
        """Its idea in one sentence, for the first line of a log."""
        return " ".join(self.idea.split("\n\n")[0].split())

    @property
    def stories(self) -> dict[str, str]:
        """What a rank does in each variant."""
        return {each.name: each.description for each in self.variants} | dict([self.headline])

    @property
    def timed(self) -> bool:
        """Whether the training of any variant is timed by itself."""
        return any(variant.build is not None for variant in self.variants)

    @property
    def audits(self) -> bool:
        """Whether its ranks train, so that what they hold alike can be compared."""
        return self.timed or self.stepped or bool(self.at_once)

    def all_predictions(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """These, of the variants that it has, and the same of each that is like one of them, unless it has its own."""
        own = {(each.variant, each.name) for each in predictions}
        like = [(variant.name, variant.like) for variant in self.variants if variant.like]
        copied = [replace(each, variant=name) for name, other in like for each in predictions if each.variant == other]
        known = [each for each in predictions if each.variant not in self.left_out]
        return [*known, *(each for each in copied if (each.variant, each.name) not in own)]

    def with_like(self, names: Sequence[str]) -> list[str]:
        """These variants, and those that are like one of them."""
        return [
            *names,
            *(each.name for each in self.variants if each.like and each.like in names and each.name not in names),
        ]

    def requested(self, names: Sequence[str]) -> "Mode":
        """The same without the variants that nobody named, where they run by name alone."""
        left_out = tuple(each.name for each in self.variants if each.by_name and each.name not in names)
        kept = tuple(each for each in self.variants if each.name not in left_out)
        return replace(self, variants=kept, left_out=left_out)

    def mistake_record(self, bug: str | None) -> dict[str, str]:
        """What the records say of the mistake `bug`; empty if it is none."""
        made = self.mistakes.get(bug or "")
        return {"name": bug or "", "what": made.what, "check": made.check} if made else {}

    def mistaken(self, bug: str | None) -> "Mode":
        """The same with the mistake `bug` made, if it is one."""
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


# What a mode of one's own is made of: `from distlab.contract import Mode, Variant`.

__all__ = ["Instead", "Mistake", "Mistakes", "Mode", "Needs", "Strategy", "Variant"]
