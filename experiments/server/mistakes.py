"""The classic mistake of a bounded server, made on purpose by LAB_BUG, and the settings that hide it."""

from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel.parameter_server import ParameterServer


class Unbounded(ParameterServer):
    """Lets nobody wait for the slowest.

    Who is ahead by how much would depend on the machine, and the mistake might not show. So the last worker takes its
    first step only once another is too far ahead: a straggler, the same each time.
    """

    def may_start(self, worker: int) -> bool:
        """Always, but for the straggler."""
        straggler, bound = max(self.clocks), (self.staleness or 0) + 1
        return self.spent or worker != straggler or max(self.clocks.values()) > bound


def too_few_steps(config: Config) -> str:
    """Nobody gets too far ahead in fewer steps than the bound and two."""
    least = config.options.model_dump()["staleness"] + 2
    if config.steps >= least:
        return ""
    return f"LAB_STEPS={config.steps}: to be too far ahead takes LAB_STALENESS + 2 = {least}"


MISTAKES = {
    "stale_unbounded": Mistake(
        "the server forgets to let the fast wait: gradients of a slow worker get as old as they like",
        "staleness",
        Instead(run={"rules": Unbounded}),
        Needs(proof=False, variants=("ssp",), unless=too_few_steps),
    )
}
