"""The transport over plain TCP: whose a message is, and in which order those of one key come."""

from benchmarks.mutants import Mutant

RUN = "RUN_MODE=dp LAB_MODEL=mlp LAB_BACKEND=tcp LAB_STEPS=1 LAB_VARIANT=flat"
MESH = "WORLD_SIZE=4 RUN_MODE=mesh LAB_BACKEND=tcp LAB_MESH=dp2,pp2 LAB_VARIANT=1f1b"
STREAM, CHANNEL = "distlab/transport/tcp.py", "distlab/transport/tcp.py"
TAKES_POSTED = "if self._posted or self._early or self._left or self._coming is not None or self.ended:"

MUTANTS = [
    Mutant(CHANNEL, "blake2b(name.encode()", 'blake2b(b""', RUN),
    Mutant(CHANNEL, "KEY.pack(self._name, tag)", 'KEY.pack(b"", tag)', MESH),
    Mutant(CHANNEL, "KEY.pack(self._name, tag)", "KEY.pack(self._name, 0)", RUN),
    Mutant(STREAM, TAKES_POSTED, TAKES_POSTED.replace("self._posted or ", ""), RUN),
    Mutant(STREAM, TAKES_POSTED, TAKES_POSTED.replace("self._early or ", ""), RUN),
    Mutant(STREAM, "for index, early in enumerate(self._early):", "for index, early in enumerate([]):", RUN),
    Mutant(STREAM, "self._early.append(early)", "self._early.insert(0, early)", RUN),
    Mutant(
        STREAM,
        "for index, awaited in enumerate(self._posted):",
        "for index, awaited in [*enumerate(self._posted)][::-1]:",
        RUN,
    ),
]
