"""The classic mistake of a bounded server, made on purpose by LAB_BUG, and the settings in which no check could see it."""

from collections.abc import Mapping

from workers.config import Config
from workers.lab import Bug
from workers.parallel.parameter_server import ParameterServer

BUGS = {
    "stale_unbounded": Bug(
        "the server forgets to let the fast wait: gradients of a slow worker get as old as they like", "staleness"
    )
}


class Unbounded(ParameterServer):
    """Lets nobody wait for the slowest.

    Who is ahead by how much would depend on the machine, and the mistake might not show. So the last worker takes its first step only once
    another is too far ahead: a straggler, the same each time.
    """

    def may_start(self, worker: int) -> bool:
        """Always, but for the straggler."""
        straggler, bound = max(self.clocks), (self.staleness or 0) + 1
        return self.spent or worker != straggler or max(self.clocks.values()) > bound


def rules_of(config: Config) -> type[ParameterServer]:
    """The rules that LAB_BUG asks for."""
    return Unbounded if config.bug == "stale_unbounded" else ParameterServer


def invisible(config: Config, unable: Mapping[str, str]) -> list[str]:
    """A sentence if the check could not see LAB_BUG with these settings, where the variants `unable` are skipped, each for its reason."""
    if config.bug not in BUGS:
        return []
    least = config.staleness + 2
    reasons = [
        (config.world_size == 1, "WORLD_SIZE=1: it takes two ranks"),
        (bool(config.variant) and "ssp" not in config.variant, "these variants: it takes ssp"),
        ("ssp" in unable, f"these settings: it takes ssp, and {unable.get('ssp')}"),
        (config.steps < least, f"LAB_STEPS={config.steps}: to be too far ahead takes LAB_STALENESS + 2 = {least}"),
    ]
    return [f"LAB_BUG={config.bug} cannot show with {reason}" for applies, reason in reasons if applies][:1]
