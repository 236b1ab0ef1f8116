"""Data parallelism: buckets, replicas and the dealing of samples."""

from benchmarks.mutants import Mutant

BUCKETED = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=bucketed LAB_BUCKET_MIB=0.001"
RING = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=ring LAB_BUCKET_MIB=0.001"
AGAIN = "RUN_MODE=dp LAB_VARIANT=flat LAB_RECOMPUTE=1"
BUCKETS, PARAMETERS = "distlab/data_parallel/buckets.py", "distlab/workload/optimizer.py"

MUTANTS = [
    Mutant(BUCKETS, "self._armed = last and self.overlap", "self._armed = False", BUCKETED),
    Mutant(BUCKETS, "self._missing[self._next] == 0:", "self._missing[self._next] <= 1:", BUCKETED),
    Mutant(
        BUCKETS,
        "        view.copy_(parameter.grad)",
        "        view.copy_(parameter.grad * (2 if view.element_size() == 4 else 1))",
        BUCKETED,
    ),
    Mutant(BUCKETS, "handle.wait()", "handle.is_completed()", RING),
    Mutant(
        PARAMETERS,
        "self.config.clip)\n        self.optimizer.step()\n\n    def held",
        "self.config.clip)\n        self.optimizer = make_optimizer(self.model.parameters(), self.config)\n"
        "        self.optimizer.step()\n\n    def held",
        BUCKETED + " LAB_OPTIMIZER=adamw",
    ),
    Mutant(PARAMETERS, "= forward(inputs, targets) * share", "= forward(inputs, targets)", BUCKETED),
    Mutant(PARAMETERS, "nn.utils.clip_grad_norm_(", "nn.utils.get_total_norm(", BUCKETED + " LAB_CLIP=0.01"),
    Mutant(
        "experiments/dp/__init__.py",
        "                dist.all_reduce(parameter.grad, group=self.group)",
        "                [dist.all_reduce(parameter.grad, group=self.group)"
        " for _ in range(2 if parameter.dtype == torch.float32 else 1)]",
        "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=per_parameter",
    ),
    Mutant(
        "distlab/workload/data.py",
        "start = sum(sizes[:shard])\n        ids",
        "start = sum(sizes[: shard - 1])\n        ids",
        BUCKETED,
    ),
    Mutant(
        "distlab/collectives/ring.py",
        "torch.add(incoming, part, out=output if last else incoming)",
        "torch.add(incoming, part if not last else part * 0, out=output if last else incoming)",
        RING,
    ),
    Mutant(
        BUCKETS,
        "self._next < len(self.buckets) and self._missing[self._next] == 0:",
        "self._next < len(self.buckets) and not any(self._missing):",
        BUCKETED,
    ),
    Mutant(
        "experiments/dp/__init__.py",
        'float("inf"), overlap=False)',
        'float("inf"), overlap=True)',
        "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=flat",
    ),
    Mutant(BUCKETS, "for index in reversed(range(len(sizes))):", "for index in range(len(sizes)):", BUCKETED),
    Mutant(
        "distlab/workload/model.py",
        "hidden = recomputed(layer, hidden) if self.recompute else layer(hidden)",
        "hidden = layer(hidden)",
        AGAIN,
    ),
    Mutant(
        "distlab/workload/model.py",
        "        del tensor\n",
        "        self.all = (*getattr(self, 'all', ()), tensor)\n",
        AGAIN,
    ),
]
