"""16 bits: the scale of the loss, masters, and rounding at random."""

from benchmarks.mutants import Mutant

MASTER = "RUN_MODE=precision LAB_MODEL=mlp LAB_STEPS=1 LAB_VARIANT=fp16_master"
GPT = "RUN_MODE=precision LAB_STEPS=1 LAB_VARIANT=fp16_master"  # whose gradients are small enough to lose digits
STOCHASTIC = "RUN_MODE=precision LAB_MODEL=mlp LAB_STEPS=1 LAB_VARIANT=bf16_stochastic"

MUTANTS = [
    Mutant("distlab/precision/__init__.py", "self.value *= self.backoff", "pass", MASTER),
    Mutant(
        "distlab/precision/__init__.py",
        "self.good_steps == self.interval",
        "self.good_steps > self.interval",
        MASTER,
    ),
    Mutant("distlab/precision/__init__.py", "gradient.isfinite().all()", "True", MASTER),
    Mutant("distlab/precision/__init__.py", "gradient.isfinite().all()", "gradient[0].isfinite().all()", MASTER),
    Mutant("distlab/precision/__init__.py", "weight.copy_(self.rounded(master))", "pass", MASTER),
    Mutant("distlab/precision/__init__.py", "weight.grad.float().div_(scale)", "weight.grad.div(scale).float()", GPT),
    Mutant("distlab/precision/__init__.py", "weight.grad.float().div_(scale)", "weight.grad.float()", MASTER),
    Mutant(
        "distlab/precision/__init__.py",
        "values.view(torch.int32) + noise",
        "values.view(torch.int32) + 0 * noise",
        STOCHASTIC,
    ),
    Mutant("distlab/precision/__init__.py", "randint(0, 1 << 16,", "randint(0, 1 << 15,", STOCHASTIC),
    Mutant(
        "experiments/precision/__init__.py",
        "taken = self.loss_scale is None or all_finite(summed)",
        "taken = True",
        MASTER,
    ),
    Mutant("experiments/precision/__init__.py", "self.loss_scale.adjust(overflowed=not taken)", "pass", MASTER),
    Mutant("experiments/precision/__init__.py", "            self.scale = self.loss_scale.value\n\n", "\n", MASTER),
    Mutant(
        "experiments/precision/__init__.py", "detach().float().clone()", "detach().to(dtype).float().clone()", MASTER
    ),
    Mutant(
        "experiments/precision/__init__.py", "detach().float().clone()", "detach().bfloat16().float().clone()", MASTER
    ),
]
