"""A rank whose main thread raised: what it ends with, what others say of it, and whether a loss may be the cause."""

import errno
from collections.abc import Iterable

from workers.cluster import ClusterError
from workers.cluster.heartbeat import Place
from workers.cluster.verdict import Verdict
from workers.config import ConfigError
from workers.report.records import Lost

# Words of errors behind which a lost rank may stand: gloo, NCCL and the store name an address at best.
BLAMELESS = ("gloo", "nccl", "store", "connection", "socket", "pipe", "timed out", "peer", "in vain")


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def failed(rank: int, place: Place, error: BaseException, waited_for: Iterable[str]) -> tuple[Verdict, Verdict]:
    """The verdict that `rank` ends with, and the one that it tells the others.

    A refusal is the run's and no rank's own: all say the same sentence, and nobody is lost.
    """
    if isinstance(error, ConfigError):
        refused = Verdict(2, f"refused    {'; '.join(error.faults)}")
        return refused, refused
    text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    if waits := ", ".join(waited_for):
        text += f"; it waited for {waits}"
    code = 3 if isinstance(error, ClusterError) else 1
    sentence = f"rank {rank} failed at step {place.step} in {place.phase}: {text}"
    lost = Lost(rank, place.step, f"failed: {text}")
    told = code if disk_refuses(error) else 3
    return Verdict(code, sentence), Verdict(told, sentence, (lost,))


def disk_refuses(error: BaseException | None) -> bool:
    """Whether a disk that is full, or that cannot be written any more, stands behind `error`.

    It is the run's disk and no rank's own: all end alike, those too that were only waiting.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK:
            return True
        error = error.__cause__ or error.__context__
    return False


def may_be_a_loss(error: BaseException | None) -> bool:
    """Whether a lost rank can be the cause of `error`, itself or in what it was raised from."""
    while error is not None:
        if isinstance(error, ConnectionError):
            return True
        if isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in BLAMELESS):
            return True
        error = error.__cause__ or error.__context__
    return False
