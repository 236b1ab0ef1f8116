"""How many descriptors a run of local ranks needs, so that too few are refused before a rank is started.

Measured over the modes, as the highest number that a process ever had: a launcher holds 7 + 4N; a rank of dp 36 at N=2
and 38 at N=4, of those that open most 68 at N=4 and 94 at N=8 (moe, whose grid has a group an axis) and 64 and 84
(elastic). What is asked for is above each by 20 at least, for a mode or a machine with a few more.
"""

import resource

from workers.config import ConfigError

BASE, EACH = 56, 8


def needed(world_size: int) -> int:
    """Of each process of a run of so many local ranks."""
    return BASE + EACH * world_size


def refuse_too_few(world_size: int) -> None:
    """Raise ConfigError where this process, and so each that it starts, may open fewer."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed(world_size):
        raise ConfigError(
            [
                f"a process may open {allowed} files here, and WORLD_SIZE={world_size} local ranks need"
                f" {needed(world_size)} each: set `ulimit -n {needed(world_size)}` or more"
            ]
        )
