"""A proof inside of a test: the same as `ranklab prove`, in the ranks that are there already."""

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from workers.config import Config
from workers.prove.proof import Proof
from workers.prove.settings import Options
from workers.prove.theirs import NAMES, Refused, of


class Heard:
    """What a proof has found."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, kind: str, *values: Any) -> None:
        """Keep the findings."""
        if kind == "finding":
            check, sentence, _ = values
            self.sentences.append(f"{check}: {sentence}")


def same_as_one_process(*, seed: int = 1, microbatches: int = 2, **own: Any) -> None:
    """Raise AssertionError on every rank, with the sentence of the proof, unless all ranks compute what one does.

    `own` are the names of a file for `ranklab prove`: model, loss, batch, train_step, prepare, strategy, mesh, ...
    Raises TypeError for another name, and ValueError for what cannot be proven.
    """
    strange = sorted(set(own) - set(NAMES))
    if strange:
        raise TypeError(f"same_as_one_process has no {', '.join(strange)}: allowed are {', '.join(NAMES)}")
    environ = {"WORLD_SIZE": "1", "LAB_SEED": str(seed), "LAB_MICROBATCHES": str(microbatches)}
    config = Config.read(environ, options=Options)
    config = config.model_copy(update={"world_size": dist.get_world_size()})
    heard = Heard()
    try:
        proof = Proof(of(own, config, "same_as_one_process(...)"), heard, nullcontext)
        proof.run()
    except Refused as refused:
        raise ValueError(str(refused)) from None
    sentences: list[str] = proof.everyone(heard.sentences)[0]
    assert not sentences, "\n".join(sentences)
