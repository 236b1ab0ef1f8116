"""The passes, which all modes share: what is timed trains, what is counted is all."""

from benchmarks.mutants import Mutant

FLAT = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=flat"
ADAMW = FLAT + " LAB_OPTIMIZER=adamw"
TIMED, OPTIMIZER, LEDGER = "distlab/verify/timed.py", "distlab/workload/optimizer.py", "distlab/measure/traffic.py"

STRATEGY, ZERO2 = "distlab/workload/optimizer.py", "RUN_MODE=fsdp LAB_MODEL=mlp LAB_VARIANT=zero2 LAB_DTYPE=bfloat16"

MUTANTS = [
    Mutant(TIMED, "if course.done[name] == step < ends[name]:", "if course.done[name] == step != 2:", FLAT),
    Mutant(
        STRATEGY,
        "self.model.parameters(), self.config.clip)\n        self.optimizer.step()\n",
        "self.model.parameters(), self.config.clip)\n"
        "        self.optimizer = make_optimizer(self.model.parameters(), self.config)\n"
        "        self.optimizer.step()\n",
        ADAMW,
    ),
    Mutant("distlab/sharded/flat_parameter.py", "            self.shard.copy_(self.master)\n", "", ZERO2),
    Mutant(TIMED, "                strategy.update()", "                pass", FLAT),
    Mutant(TIMED, "course.batches, course.data_step(step))", "course.batches, course.data_step(0))", FLAT),
    Mutant(
        OPTIMIZER,
        "parameter.add_(parameter.grad, alpha=-lr)",
        "parameter.add_(parameter.grad, alpha=-lr if parameter.dtype == torch.float64 else -2 * lr)",
        FLAT,
    ),
    Mutant(
        OPTIMIZER,
        "torch.optim.AdamW(parameters, lr=config.learning_rate)",
        "torch.optim.AdamW(parameters, lr=2 * config.learning_rate, weight_decay=0)",
        ADAMW,
    ),
    Mutant(
        "distlab/measure/traffic.py",
        "entry.called_bytes += called_bytes",
        "entry.called_bytes += 0.75 * called_bytes",
        FLAT,
    ),
    Mutant("distlab/measure/traffic.py", "entry.calls += 1", "entry.calls += 2", FLAT),
    Mutant(LEDGER, "if peer != self.rank:\n", "if peer != self.rank and peer != 1:\n", FLAT),
    Mutant(
        "distlab/measure/traffic.py", "sent - retransmitted + waiting", "(sent - retransmitted + waiting) // 2", FLAT
    ),
    Mutant(
        "distlab/measure/tensors.py",
        "if found.shape == wanted.shape else math.inf",
        "if found.shape == wanted.shape else 0.0",
        FLAT,
        argued="no variant has a tensor of another shape",
    ),
]
