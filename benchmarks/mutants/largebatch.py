"""Large batches: rates, LARS, LAMB, the dealing of samples and the sweep."""

from benchmarks.mutants import Mutant

LARS, LAMB = (f"RUN_MODE=largebatch LAB_MODEL=mlp LAB_STEPS=8 LAB_VARIANT={name}" for name in ("lars", "lamb"))
PLAIN = "RUN_MODE=largebatch LAB_MODEL=mlp LAB_STEPS=8 LAB_VARIANT=warmup"
TEXT = "RUN_MODE=largebatch LAB_MODEL=gpt LAB_STEPS=8 LAB_VARIANT=warmup"

MUTANTS = [
    Mutant("distlab/large_batch/__init__.py", "w / (g + decay * w)", "w / g", LARS),
    Mutant("distlab/large_batch/__init__.py", "mul_(self.momentum).add_(", "mul_(0).add_(", LARS),
    Mutant("distlab/large_batch/__init__.py", "(w > 0) & (g > 0)", "g > 0", LARS),
    Mutant("distlab/large_batch/__init__.py", 'state["m"] / (1 - first ** state["step"])', 'state["m"] / 1', LAMB),
    Mutant("distlab/large_batch/__init__.py", "w.clamp(*self.bounds) / u", "w / u", LAMB),
    Mutant(
        "distlab/large_batch/__init__.py",
        'self.adam(parameter).add_(parameter, alpha=group["weight_decay"])',
        "self.adam(parameter)",
        LAMB,
    ),
    Mutant("distlab/large_batch/__init__.py", "dist.all_reduce(squares, group=self.sharded_over)", "pass", LARS),
    Mutant(
        "distlab/large_batch/__init__.py",
        "if each.dim() > 1], [each for each in every if each.dim() <= 1]",
        "if each.dim() > 0], [each for each in every if each.dim() <= 0]",
        LAMB,
    ),
    Mutant(
        "distlab/large_batch/__init__.py",
        "(target - 1.0) * step / warmup_steps",
        "(target - 1.0) * (step + 1) / warmup_steps",
        PLAIN,
    ),
    Mutant("distlab/large_batch/__init__.py", 'factor * group["base_lr"]', 'factor * group["lr"]', PLAIN),
    Mutant("experiments/largebatch/training.py", "return steps // 4", "return steps // 2", PLAIN),
    Mutant(
        "experiments/largebatch/training.py",
        "self.trained[step * self.batch : (step + 1) * self.batch]",
        "self.trained[: self.batch]",
        PLAIN,
    ),
    Mutant("experiments/largebatch/sweep.py", "            part(step)", "            part(0)", PLAIN),
    Mutant(
        "experiments/largebatch/training.py",
        "set_rates(self.optimizer.param_groups, self.recipe.factor(self.k, step, self.steps))",
        "set_rates(self.optimizer.param_groups, self.recipe.factor(self.k, step, 8))",
        PLAIN,
    ),
    # what a sweep draws
    Mutant(
        "experiments/largebatch/training.py",
        "ids[:num_samples], ids[num_samples:]",
        "ids[:num_samples], ids[:HELD_OUT]",
        PLAIN,
    ),
    Mutant("experiments/largebatch/training.py", "[:num_samples], order[-held:]", "[:num_samples], order[:held]", TEXT),
    Mutant(
        "experiments/largebatch/sweep.py",
        "seed: Stream(config, seed, config",
        "seed: Stream(config, config.seed, config",
        PLAIN,
    ),
    Mutant(
        "experiments/largebatch/sweep.py", "build_model(config, seed).to", "build_model(config, config.seed).to", PLAIN
    ),
]
