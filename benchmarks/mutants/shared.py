"""What ranks share with the one process that they are held against: wrong on both sides, it is wrong alike."""

from benchmarks.mutants import Mutant

FLAT = "RUN_MODE=dp LAB_VARIANT=flat"
MLP, LINE = (f"{FLAT} LAB_MODEL={name}" for name in ("mlp", "line"))
BF16, TIED, AGAIN = FLAT + " LAB_DTYPE=bfloat16", FLAT + " LAB_TIE=1", FLAT + " LAB_RECOMPUTE=1"
MESH = "RUN_MODE=mesh WORLD_SIZE=2 LAB_MICROBATCHES=2 LAB_BATCH=16 LAB_VARIANT=gpipe"
DROPPING, ELASTIC = MESH + " LAB_DROPOUT=0.1", "RUN_MODE=elastic LAB_VARIANT=shrink LAB_LOSSES=1"
MIXED = "RUN_MODE=moe LAB_VARIANT=replicated"
MODEL, DATA, DROPOUT, RECOMPUTE, OPTIMIZER, EXPERTS = (
    "distlab/workload/model.py",
    "distlab/workload/data.py",
    "distlab/workload/model.py",
    "distlab/workload/model.py",
    "distlab/workload/optimizer.py",
    "distlab/workload/experts.py",
)
LOSS = "distlab/workload/user_model.py"
NORM = """        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, hidden: Tensor) -> Tensor:
        out:"""
NO_GRADIENT = "            with torch.enable_grad():  # the backward pass runs without\n"
LAST_THREE = '            _Pass.last = [*getattr(_Pass, "last", []), self][-3:]\n'

MUTANTS = [
    # the model
    Mutant(
        MODEL,
        "self.token(tokens) + self.position.weight[at]",
        "self.token(tokens) + 0 * self.position.weight[at]",
        FLAT,
    ),
    Mutant(MODEL, "hidden = hidden + self.attention(", "hidden = self.attention(", FLAT),
    Mutant(MODEL, "is_causal=True", "is_causal=False", FLAT),
    Mutant(MODEL, "k, v, is_causal=True", "k, v, is_causal=True, scale=1.0", FLAT),
    Mutant(MODEL, "self.head_dim = width // heads", "self.head_dim = width", FLAT),
    Mutant(MODEL, "self.down(F.gelu(self.up(hidden)))", "self.down(F.relu(self.up(hidden)))", MLP),
    Mutant(MODEL, "F.gelu(self.up(hidden))", 'F.gelu(self.up(hidden), approximate="tanh")', FLAT),
    Mutant(MODEL, "self.project(self.norm(hidden))", "self.project(hidden)", FLAT),
    Mutant(
        MODEL,
        NORM,
        NORM.replace("(width)", "(width, eps=1e-3)", 1),
        MLP,
    ),
    Mutant(MODEL, "if config.tie:", "if False:", TIED),
    Mutant(
        MODEL,
        'for _ in range(config.depth)]\n    return Model("gpt"',
        'for _ in range(config.depth - 1)]\n    return Model("gpt"',
        FLAT,
    ),
    Mutant(LOSS, "ignore_index=IGNORED)", "ignore_index=IGNORED, label_smoothing=0.1)", FLAT),
    Mutant(LOSS, "    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))\n", "", BF16),
    Mutant(
        LOSS, 'targets.to(outputs.dtype), reduction="sum")', 'targets.to(outputs.dtype), reduction="sum") / 2', LINE
    ),
    # its first weights
    Mutant(MODEL, "deviation = 0.02 if", "deviation = 0.2 if", FLAT),
    Mutant(MODEL, "else 1 / math.sqrt(parameter.shape[1])", "else 1 / parameter.shape[1]", MLP),
    Mutant(MODEL, 'fill_(0.0 if name.endswith("bias") else 1.0)', "fill_(1.0)", FLAT),
    Mutant(
        MODEL,
        "generator = torch.Generator().manual_seed(seed)\n",
        "generator = torch.Generator().manual_seed(1)\n",
        FLAT + " LAB_SEED=2",
    ),
    Mutant(
        MODEL,
        "parameter.copy_(torch.randn(parameter.shape, generator=generator)",
        "parameter.copy_(torch.randn(parameter.shape, generator=generator.manual_seed(seed))",
        FLAT,
    ),
    # the data
    Mutant(DATA, "return windows[:, :-1], windows[:, 1:]", "return windows[:, 1:], windows[:, 1:]", FLAT),
    Mutant(DATA, "starts = ids * self.terms %", "starts = ids %", FLAT),
    Mutant(DATA, "2.0 * x + 1.0 +", "2.0 * x +", MLP),
    Mutant(DATA, "draw.gauss(0.0, 0.1)", "draw.gauss(0.0, 1.0)", LINE),
    Mutant(DATA, "manual_seed(1_000_003 * seed + epoch)", "manual_seed(1_000_003 * seed)", FLAT),
    Mutant(DATA, "manual_seed(1_000_003 * seed + epoch)", "manual_seed(epoch)", FLAT + " LAB_SEED=2"),
    Mutant(
        DATA,
        "return torch.randperm(num_samples, generator=generator)",
        "return torch.randint(num_samples, (num_samples,), generator=generator)",
        FLAT,
    ),
    Mutant(DATA, "order[index * self.batch : (index + 1) * self.batch]", "order[: self.batch]", FLAT),
    Mutant(DATA, "return samples, 2 if proof", "return samples, 4 if proof", FLAT),
    Mutant(DATA, "for given in range(min(2, sizes[1] - 1)):", "for given in range(0):", FLAT + " WORLD_SIZE=2"),
    Mutant(
        DATA,
        "sizes = shard_sizes(len(ids), num_parts, uneven=self.uneven)",
        "sizes = shard_sizes(len(ids), num_parts)",
        FLAT + " LAB_MICROBATCHES=2",
    ),
    Mutant(DATA, "self.terms = config.seq\n", "self.terms = config.seq // 2\n", FLAT),
    # how much of it is proven
    Mutant(DATA, "PROOF_STEPS = 3", "PROOF_STEPS = 1", FLAT),
    Mutant(
        "distlab/verify/proof.py",
        "wanted = dense[step] if lab.rank == 0 else None\n        share",
        "wanted = dense[step] if lab.rank == 0 and not step else None\n        share",
        FLAT,
    ),
    # dropout
    Mutant(DROPOUT, " / (1 - self.share)", " / 1", DROPPING),
    Mutant(DROPOUT, ">= self.share)", ">= self.share / 2)", DROPPING),
    Mutant(DROPOUT, 'f"{self.seed} {part} {sample}"', 'f"{self.seed} {part}"', DROPPING),
    Mutant(DROPOUT, 'f"{self.seed} {part} {sample}"', 'f"{self.seed} {sample}"', DROPPING),
    Mutant(DROPOUT, 'f"{self.seed} {part} {sample}"', 'f"{part} {sample}"', DROPPING),
    Mutant(DROPOUT, 'PARTS = ("attention", "mlp")', 'PARTS = ("attention",)', DROPPING),
    # recomputation
    Mutant(RECOMPUTE, "        del tensor\n", '        self.__dict__.setdefault("all", []).append(tensor)\n', AGAIN),
    Mutant(
        RECOMPUTE,
        NO_GRADIENT,
        LAST_THREE + NO_GRADIENT,
        AGAIN,
    ),
    Mutant(MODEL, "recomputed(layer, hidden) if self.recompute else", "recomputed(layer, hidden) if False else", AGAIN),
    Mutant("experiments/mesh/stack.py", "again = self.recompute and", "again = False and", MESH + " LAB_RECOMPUTE=1"),
    # the optimizer
    Mutant(
        OPTIMIZER,
        "parameter.add_(parameter.grad, alpha=-lr)",
        "parameter.add_(parameter.grad, alpha=-2 * lr)",
        ELASTIC + " LAB_OPTIMIZER=sgd",
    ),
    Mutant(
        OPTIMIZER,
        "lr=config.learning_rate)\n    return",
        "lr=config.learning_rate, betas=(0.9, 0.99))\n    return",
        ELASTIC,
    ),
    Mutant(
        OPTIMIZER,
        "lr=config.learning_rate)\n    return",
        "lr=config.learning_rate, weight_decay=0)\n    return",
        ELASTIC,
    ),
    # mixtures of experts
    Mutant(
        EXPERTS,
        "F.linear(tokens.to(dtype), self.weight.to(dtype))",
        "F.linear(tokens.to(dtype), self.weight.to(dtype)) / 2",
        MIXED,
    ),
    Mutant(EXPERTS, "BIAS_RATE = 0.001", "BIAS_RATE = 0.01", MIXED + " LAB_BALANCE=bias"),
    Mutant("experiments/moe/__init__.py", "BALANCE_WEIGHT = 0.01", "BALANCE_WEIGHT = 0.1", MIXED),
    Mutant(
        EXPERTS,
        "MLP):\n            layer.mlp = Mixture(width, 4 * width, mixing)",
        "MLP):\n            layer.mlp = Mixture(width, 2 * width, mixing)",
        MIXED,
    ),
]
