"""Injected bugs of saving and resuming, for every mode that makes checkpoints.

save_without_barrier: rank 0 publishes without waiting. Whether the others' files exist by then is a race; here they
always lose it. resume_repeats_epoch: a resumed run forgets how far into its epoch it was.
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

    Of all ranks but 0: take `files` out of the partial folder, and put them into the published one once it is there.
    """
    waiting = {path.relative_to(partial): path.read_bytes() for path in files} if rank > 0 else {}
    for name in waiting:
        (partial / name).unlink()

    def arrive(final: Path) -> None:
        for name, content in waiting.items():
            (final / name).write_bytes(content)

    return ([] if rank > 0 else files), arrive


@mistake(
    "resume_repeats_epoch",
    check="resumed samples",
    part="resumed_batch",
    needs=Needs(ranks=1, saves=True, unless=one_batch),
)
def first_batch(batch: int) -> int:  # noqa: ARG001
    """A resumed run begins its epoch anew: the samples that were seen before are seen twice."""
    return 0
