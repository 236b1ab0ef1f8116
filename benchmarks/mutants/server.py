"""The parameter server, asynchronous workers, and rounds."""

from benchmarks.mutants import Mutant

RUN = "RUN_MODE=server LAB_MODEL=mlp LAB_LOCAL_STEPS=2"
APART, ROUNDS = f"{RUN} LAB_VARIANT=ssp,downpour", f"{RUN} LAB_VARIANT=local_sgd,diloco"
LESSON, RULES = "experiments/server/__init__.py", "distlab/parameter_server/server.py"
OUTER = "distlab/parameter_server/local_sgd.py"

MUTANTS = [
    Mutant(RULES, "dealt(self.steps, self.rank, self.num_workers)", "dealt(self.steps, 0, self.num_workers)", APART),
    Mutant(RULES, "dealt(self.steps, self.rank, self.num_workers)", "dealt(0, self.rank, self.num_workers)", APART),
    Mutant(RULES, "(self.model, part, index)", "(self.model, part._replace(share=part.share**2), index)", APART),
    Mutant(RULES, "update += self.vectors.gradients", "update += self.vectors.gradients * self.num_workers", APART),
    Mutant(RULES, "gradients, alpha=-self.lr)", "gradients, alpha=-2 * self.lr)", APART),
    Mutant(RULES, "(update, alpha=-self.lr)", "(update, alpha=-self.lr / len(self.clocks))", APART),
    Mutant(
        RULES,
        "self.weights.add_(update, alpha=-self.lr)",
        "self.weights.add_(update, alpha=-self.lr * (number != 2))",
        APART,
    ),
    Mutant(RULES, "self.lead(worker) <= self.staleness", "self.lead(worker) <= self.staleness + 1", APART),
    Mutant(RULES, "granted = min(most, self.budget)", "granted = min(most, self.budget + 1)", APART),
    Mutant(RULES, "self.budget -= granted", "self.budget -= 1", APART),
    Mutant(
        RULES,
        "weights.copy_(self.rules.weights)\n            if",
        "len(self.rules.history) > 4 or weights.copy_(self.rules.weights)\n            if",
        APART,
    ),
    Mutant(RULES, "link.receive(vector), loss)", "link.receive(vector).mul_(2), loss)", APART),
    Mutant(OUTER, "self._share / self.done", "1 / dist.get_world_size(self.group)", ROUNDS),
    Mutant(OUTER, "self.velocity.mul_(self.momentum)", "self.velocity.mul_(0)", ROUNDS),
    Mutant(OUTER, "alpha=self.momentum)", "alpha=0)", ROUNDS),
    Mutant(OUTER, "self.weights.copy_(self.common)", "self.common.copy_(self.weights)", ROUNDS),
    Mutant(
        OUTER,
        "        dist.all_reduce(moved, group=self.group)",
        "        dist.all_reduce(moved if moved.element_size() == 8 else moved.clone(), group=self.group)",
        ROUNDS,
    ),
    Mutant(LESSON, "gradients /= count", "gradients /= self.peers.world_size", f"{RUN} LAB_VARIANT=sync"),
    # numbers of papers
    Mutant(LESSON, "(1.0, 0.0), (0.7, 0.9)", "(1.0, 0.0), (0.7, 0.5)", ROUNDS),
    Mutant(LESSON, "(1.0, 0.0), (0.7, 0.9)", "(1.0, 0.0), (0.4, 0.9)", ROUNDS),
    Mutant(LESSON, "(1.0, 0.0), (0.7, 0.9)", "(0.9, 0.0), (0.7, 0.9)", ROUNDS),
]
