"""What a variant does about a loss, as data: course.py goes by it."""

from typing import NamedTuple

from experiments.elastic.net import BACK

MEMBER, SPARE, NOBODY = "member", "spare", "nobody"  # what a rank outside asks to be let in as


class Policy(NamedTuple):
    """What a variant does about a loss."""

    name: str
    restarts: bool = False  # all begin again from the last checkpoint
    spares: int = 0  # ranks that wait outside from the start
    returns: bool = False  # whoever died comes back and asks to be let in
    sharded: bool = False  # no member has another's part of the optimizer's state
    copies: bool = False  # save one, that keeps its copy

    @property
    def wishes(self) -> set[str]:
        """Who is taken in, by what it asks as: in a variant in which ranks come back those of drills and real ones."""
        return {MEMBER, BACK} if self.returns or self.restarts else {MEMBER}

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints."""
        return self.restarts or self.sharded

    @property
    def wish(self) -> str:
        """What a rank that died comes back as."""
        return MEMBER if self.returns else NOBODY
