"""Context parallelism: what is seen of other ranks' keys, how parts are merged, and what comes home."""

from benchmarks.mutants import Mutant

GPT = "RUN_MODE=cp LAB_DEPTH=1 LAB_SEQ=30 LAB_STEPS=2 LAB_VARIANT="
BF16 = "RUN_MODE=cp LAB_DEPTH=1 LAB_SEQ=30 LAB_STEPS=2 LAB_DTYPE=bfloat16 LAB_VARIANT="
RING = BLOCKS = SHIFT = "distlab/context_parallel/ring.py"
POSITIONS = STRATEGY = "distlab/context_parallel/strategy.py"
ULYSSES, LESSON = "distlab/context_parallel/ulysses.py", "experiments/cp/__init__.py"

MUTANTS = [
    Mutant(RING, "        return own if theirs is None else own.add_(theirs)", "        return own", GPT + "ring"),
    Mutant(
        RING,
        "            total = part if theirs is None else part.add_(theirs)",
        "            total = part",
        GPT + "ring",
    ),
    Mutant(RING, "                    to_q[:, :, first_row:] += found[0]\n", "", GPT + "zigzag"),
    Mutant(
        RING, "rows = whole.rows_from(first_row)", "rows = attend(q[:, :, first_row:], keys, values)", GPT + "zigzag"
    ),
    Mutant(
        RING,
        "next_rank, rank_before = self.peers.after(1), self.peers.after(-1)",
        "next_rank, rank_before = self.peers.after(-1), self.peers.after(1)",
        GPT + "zigzag",
    ),
    Mutant(BLOCKS, "    part.lse.copy_(lse)\n", "", GPT + "ring"),
    Mutant(BLOCKS, "(more.lse - lse).exp_()", "(more.lse - part.lse).exp_()", GPT + "ring"),
    Mutant(
        SHIFT,
        "        arrived(messages)\n        own[:, :, :, : came.shape[3]] += came\n",
        "        arrived(messages)\n",
        GPT + "shift",
    ),
    Mutant(SHIFT, "mine[:, :, :, :num_keys]", "mine[:, :, :, mine.shape[3] - num_keys :]", GPT + "shift"),
    Mutant(POSITIONS, "key.start < row.start", "key.start <= row.stop", GPT + "zigzag"),
    Mutant(POSITIONS, "runs[2 * num_ranks - 1 - rank])", "runs[num_ranks + rank])", GPT + "zigzag"),
    Mutant(
        ULYSSES,
        "swap.to_heads, swap.to_rows)",
        "swap.to_heads, lambda gradient: swap.to_rows(gradient) * 2)",
        GPT + "ulysses",
    ),
    Mutant(ULYSSES, "got[peers.rank] = parts[peers.rank]", "got[peers.rank] = parts[peers.rank] * 0", GPT + "ulysses"),
    Mutant(STRATEGY, "    set_positions(model, positions, rank)\n", "", GPT + "ring"),
    Mutant(
        STRATEGY,
        "loss: Tensor = self.model(self.own(inputs), self.own(targets))",
        "loss: Tensor = self.model(self.own(inputs), self.own(targets)) / 3",
        GPT + "gathered",
    ),
    Mutant(
        STRATEGY,
        "buckets = GradientBuckets(model.parameters(), group,",
        "buckets = GradientBuckets(list(model.parameters())[1:], group,",
        GPT + "gathered",
    ),
    Mutant(LESSON, "of(self.rank)[:, None] < torch", "of(self.rank)[:, None] <= torch", GPT + "gathered"),
    Mutant(
        "distlab/tensor_parallel/layers.py",
        "lambda gradient: reduce_scatter(gradient, self.scattering)",
        "lambda gradient: reduce_scatter(gradient, self.scattering) / 3",
        GPT + "gathered",
    ),
    # sums of 16-bit rows
    Mutant(BLOCKS, "return torch.promote_types(x.dtype, torch.float32)", "return x.dtype", BF16 + "ring"),
    Mutant(RING, "Part(own.out.to(sum_type(q)), own.lse)", "Part(own.out, own.lse)", BF16 + "zigzag"),
    Mutant(RING, "        to_q = to_q.to(sum_type(q))\n", "", BF16 + "shift"),
]
