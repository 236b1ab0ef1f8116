"""Sharded data parallelism: when weights come and go, when gradients are summed, and what is given back."""

from benchmarks.mutants import Mutant

RUN = "RUN_MODE=fsdp LAB_MODEL=mlp LAB_DEPTH=4 LAB_VARIANT="
ZERO = "distlab/sharded/zero.py"

MUTANTS = [
    Mutant("distlab/sharded/zero.py", "        self.units[index].free()", "        pass", RUN + "zero3"),
    Mutant(ZERO, "            self._begin(place + 1)", "            self._begin(place)", RUN + "zero3"),
    Mutant(ZERO, "        self._begin(place - 1)", "        self._begin(place - 2)", RUN + "zero3"),
    Mutant(
        ZERO,
        "            self.unshard.begin(self.unit_of[place])",
        "            [self.unshard.begin(unit) for unit in range(self.unit_of[place], len(self.units))]",
        RUN + "zero3",
    ),
    Mutant(ZERO, "            del self._gradients[index]", "            pass", RUN + "zero2"),
    Mutant("distlab/sharded/zero.py", "        self.collective.peers.memory.release()", "        None", RUN + "zero2"),
    Mutant(
        "distlab/sharded/zero.py",
        "        self.finish()\n        own =",
        "        own =",
        RUN + "zero1 LAB_MICROBATCHES=2",  # from stage 2 on there is none under way by then, over gloo
    ),
    Mutant(
        "distlab/sharded/flat_parameter.py",
        "self.shard.grad.add_(part)",
        "self.shard.grad.copy_(part)",
        RUN + "zero2 LAB_MICROBATCHES=2",
    ),
    Mutant(
        "experiments/fsdp/__init__.py",
        "        computed = compute(hidden)\n        unit.free()",
        "        computed = compute(hidden)",
        RUN + "zero3_blocking",
    ),
]
