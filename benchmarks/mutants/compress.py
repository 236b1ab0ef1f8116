"""Compressors: what is sent, what is kept, and what is drawn."""

from benchmarks.mutants import Mutant


def of(variant: str, ratio: float = 0.1) -> str:
    return f"RUN_MODE=compress LAB_MODEL=mlp LAB_STEPS=1 LAB_RATIO={ratio} LAB_VARIANT={variant}"


MUTANTS = [
    Mutant(
        "distlab/compression/compressors.py",
        "return self.residual.add_(bucket)",
        "return self.residual.copy_(bucket)",
        of("topk"),
    ),
    Mutant(
        "distlab/compression/compressors.py",
        "return self.residual.add_(bucket)",
        "return self.residual.mul_(0.9).add_(bucket)",
        of("sign"),
    ),
    Mutant(
        "distlab/compression/compressors.py",
        "            self.decode(received, bucket)",
        "            self.decode(received, bucket)\n            self.residual = None",
        of("int8"),
    ),
    Mutant(
        "distlab/compression/compressors.py",
        "        values[places] = 0\n",
        "        values[places[1:]] = 0\n",
        of("topk"),
    ),
    Mutant(
        "distlab/compression/compressors.py",
        "kth = torch.topk(magnitudes, k).values[-1]",
        "kth = torch.topk(values[places], k).values[-1]",
        of("topk"),
    ),
    Mutant(
        "distlab/compression/compressors.py",
        "return torch.randperm(numel, generator=generator)[:k]",
        "return torch.arange(k)",
        of("randomk", ratio=0.5),  # below a quarter places are drawn with repetition
    ),
    Mutant(
        "distlab/compression/compressors.py",
        "draw_places(len(values), num_kept(len(values), self.ratio), self._generator)",
        "draw_places(len(values), num_kept(len(values), self.ratio), torch.Generator().manual_seed(1))",
        of("randomk"),
    ),
    Mutant(
        "distlab/compression/compressors.py",
        "codes.add_(values, alpha=1 / self.scale)",
        "codes.zero_().add_(values, alpha=1 / self.scale)",
        of("int8"),
    ),
    Mutant("distlab/compression/compressors.py", "self.levels = 127 // group.size()", "self.levels = 127", of("int8")),
    Mutant(
        "distlab/compression/compressors.py",
        "dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)",
        "pass",
        of("int8"),
    ),
    Mutant("distlab/compression/compressors.py", "message.clamp_(-self.limit, self.limit)", "pass", of("fp16")),
    Mutant("distlab/compression/compressors.py", "packed(values >= 0)", "packed(values > 1e-3)", of("sign")),
    Mutant("distlab/compression/compressors.py", ".sum() / len(values)", ".sum() / (len(values) + 1)", of("sign")),
    Mutant(
        "distlab/compression/powersgd.py",
        "q.copy_(orthonormal(q))",
        "q.copy_(first_factor(q.shape, self.seed))",
        of("powersgd"),
    ),
    Mutant("distlab/compression/powersgd.py", "alpha=1 / self.group.size()", "alpha=1", of("powersgd")),
    Mutant(
        "distlab/compression/powersgd.py",
        "            dist.all_reduce(factors.right, group=self.group)",
        "            pass",
        of("powersgd"),
    ),
]
