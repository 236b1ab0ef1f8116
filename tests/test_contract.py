"""The Mode object: working defaults, and injected bugs as replacements of parts."""

from functools import partial
from typing import Any

import pytest

from distlab.contract import Instead, Mistake, Mistakes, Mode, Needs, Variant, all_there, where_it_was
from distlab.lab.config import Config
from distlab.lab.workload.data import Batches

SUMMED = "right"


def naive(*arguments: Any) -> Any:
    return SUMMED, len(arguments)


def run(lab: Any, sampler: str = "right") -> Any:
    return lab, sampler


mistake = Mistakes()


@mistake("part", check="gradients", part="SUMMED", of=("naive",), put=lambda wrong: wrong.__name__)
def sums_wrongly() -> None:
    """Sums wrongly: the sent tensor
    is not the sum.

    On every rank.
    """


@mistake("data", check="samples", part="batches")
class Others(Batches):
    """Assigns samples differently."""


@mistake("run", check="shards", part="sampler", needs=Needs(ranks=3))
def samples_wrongly() -> None: ...


@mistake("resume", check="resumed samples", part="resumed_batch")
def batch_after(batch: int) -> int:
    """Leaves a batch out."""
    return batch + 1


MODE = Mode(
    variants=(Variant("naive", naive), Variant("torchs", naive, by_torch=True), Variant("extra")),
    run=run,
    mistakes=mistake,
)


def test_an_empty_mode_has_working_defaults() -> None:
    mode, config = Mode(), Config.read({"WORLD_SIZE": "3"})
    assert mode.title(config) == "gpt, 867.1k parameters"
    assert (mode.predict(config), mode.refuse(config), dict(mode.cannot(config))) == ([], [], {})
    assert mode.axes(config) == {"dp": 3}
    assert (mode.names, mode.by_torch, mode.timed) == ((), (), False)
    assert mode.model(config, 1).describe() == mode.title(config)
    assert mode.more_parameters(config) == 0
    assert mode.refuse(Config.read({"LAB_HEADS": "7"})) == [
        "LAB_WIDTH=128 is not a multiple of LAB_HEADS=7: heads share the width equally"
    ]


def test_names_are_in_reading_order() -> None:
    assert MODE.names == ("naive", "torchs", "extra")
    assert (MODE.by_torch, MODE.timed) == (("torchs",), True)


def made(mode: Mode) -> list[Any]:
    """Return the parts that a mode uses."""
    builds = [each.build(1, 2, 3) if each.build else None for each in mode.variants]
    assert mode.run is not None
    return [*builds, mode.run("lab"), mode.batches, mode.resumed_batch(5), mode.shards_written]


RIGHT = [("right", 3), ("right", 3), None, ("lab", "right"), Batches, 5, all_there]


@pytest.mark.parametrize(
    ("bug", "place", "wrong"),
    [
        ("part", 0, ("sums_wrongly", 3)),
        ("data", 4, Others),
        ("run", 3, ("lab", samples_wrongly)),
        ("resume", 5, 6),
        (None, 0, ("right", 3)),
    ],
)
def test_an_injected_bug_replaces_only_its_part(bug: str | None, place: int, wrong: Any) -> None:
    assert made(MODE) == RIGHT
    assert made(MODE.mistaken(bug)) == [*RIGHT[:place], wrong, *RIGHT[place + 1 :]]
    assert made(MODE) == RIGHT  # the mode itself stays as it was
    assert where_it_was(5) == 5


def test_the_record_of_a_bug_has_its_check() -> None:
    made = MODE.mistakes["part"]
    assert MODE.mistake_record("part") == {"name": "part", "what": made.what, "check": "gradients"}
    assert MODE.mistake_record(None) == MODE.mistake_record("absent") == {}


def test_a_bug_is_declared_at_its_wrong_part() -> None:
    """The first paragraph of the docstring describes the bug; without a docstring its name does."""
    sentences = {name: each.what for name, each in mistake.items()}
    assert sentences == {
        "part": "sums wrongly: the sent tensor is not the sum",
        "data": "assigns samples differently",
        "run": "run",
        "resume": "leaves a batch out",
    }
    assert mistake["run"] == Mistake("run", "shards", Instead(run={"sampler": samples_wrongly}), Needs(ranks=3))


@pytest.mark.parametrize(
    ("needs", "environ", "reason"),
    [
        (Needs(), {"LAB_PROOF": "0"}, "LAB_PROOF=0: nothing is compared"),
        (Needs(proof=False), {"LAB_PROOF": "0"}, ""),
        (Needs(), {"WORLD_SIZE": "1"}, "WORLD_SIZE=1: it takes 2 ranks"),
        (Needs(ranks=1), {"WORLD_SIZE": "1"}, ""),
        (Needs(clip=True), {}, "LAB_CLIP unset: nothing is clipped"),
        (Needs(clip=True), {"LAB_CLIP": "1"}, ""),
        (Needs(saves=True), {}, "LAB_CHECKPOINT_EVERY unset: nothing is saved"),
        (Needs(saves=True), {"LAB_CHECKPOINT_EVERY": "21"}, "LAB_CHECKPOINT_EVERY above LAB_STEPS: nothing is saved"),
        (Needs(saves=True), {"LAB_CHECKPOINT_EVERY": "20"}, ""),
        (Needs(microbatches=2), {}, "LAB_MICROBATCHES=1: it takes 2 microbatches"),
        (Needs(microbatches=2), {"LAB_MICROBATCHES": "2"}, ""),
        (Needs(variants=("extra", "torchs")), {"LAB_VARIANT": "naive"}, "these variants: it takes extra or torchs"),
        (Needs(variants=("extra", "torchs")), {"LAB_VARIANT": "naive,extra"}, ""),
        (
            Needs(unless=lambda config: f"LAB_SEED={config.seed}: it is seen with others"),
            {},
            "LAB_SEED=1: it is seen with others",
        ),
    ],
)
def test_settings_that_hide_a_bug_are_found(needs: Needs, environ: dict[str, str], reason: str) -> None:
    assert Mistake("", "", Instead(), needs).hidden(MODE, Config.read(environ)) == reason


def test_a_bug_of_excluded_variants_cannot_show() -> None:
    mode = Mode(variants=MODE.variants, cannot=lambda config: {"naive": "it is too small"})
    hidden = partial(mistake["part"].hidden, mode)
    assert hidden(Config.read({})) == "these settings: naive cannot run: it is too small"
    assert hidden(Config.read({"LAB_VARIANT": "torchs"})) == "these variants: it takes naive"
    assert mistake["part"].hidden(MODE, Config.read({})) == ""
