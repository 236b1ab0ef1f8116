"""Injected bugs of saving and resuming, for every mode that makes checkpoints.

save_without_barrier: rank 0 publishes without waiting. Whether the files of the others exist by then is a race, which
they always lose here. resume_repeats_epoch: a resumed run forgets its position in the epoch.
"""

from pathlib import Path

from distlab.contract import Arrive, Mistakes, Needs
from distlab.lab.config import Config

mistake = Mistakes()


def one_batch(config: Config) -> str:
    """Return why restarting an epoch could not be detected."""
    return "LAB_MODEL=line: its epoch is one batch" if config.model == "line" else ""


@mistake("save_without_barrier", check="checkpoint", part="shards_written", needs=Needs(proof=False, saves=True))
def hold_back(files: list[Path], partial: Path, rank: int) -> tuple[list[Path], Arrive]:
    """Rank 0 declares a checkpoint complete before the other ranks have written their shards.

    On all ranks except 0: remove `files` from the partial folder, and write them into the published one later.
    """
    delayed = {path.relative_to(partial): path.read_bytes() for path in files} if rank > 0 else {}
    for name in delayed:
        (partial / name).unlink()

    def arrive(final: Path) -> None:
        for name, content in delayed.items():
            (final / name).write_bytes(content)

    return ([] if rank > 0 else files), arrive


@mistake(
    "resume_repeats_epoch",
    check="resumed samples",
    part="resumed_batch",
    needs=Needs(ranks=1, saves=True, unless=one_batch),
)
def first_batch(batch: int) -> int:  # noqa: ARG001
    """A resumed run begins its epoch again, so it uses the earlier samples twice."""
    return 0
