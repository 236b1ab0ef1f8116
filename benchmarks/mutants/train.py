"""What DistributedSampler deals, and what is gathered of it."""

from benchmarks.mutants import Mutant

TRAIN = "experiments/train/__init__.py"
RUN = "RUN_MODE=train"

MUTANTS = [
    Mutant(TRAIN, "shuffle=True, seed=SEED)", "shuffle=True, seed=SEED + rank)", RUN),
    Mutant(TRAIN, "rank=rank, shuffle=True", "rank=0, shuffle=True", RUN),
    Mutant(TRAIN, "begin_epoch(sampler, epoch)", "begin_epoch(sampler, 0)", RUN),
    Mutant(TRAIN, "result = data * (lab.rank + 1)", "result = data * lab.rank", RUN),
    Mutant(TRAIN, "dist.all_gather(gathered, result, group=lab.group)", "gathered = [result] * lab.world_size", RUN),
    Mutant(TRAIN, "show(lab, epoch, batches[0])", "show(lab, epoch, batches[1])", RUN),
]
