"""Communication: what a collective leaves behind, the meter that counts it, and random numbers that a resume gives
back."""

from benchmarks.mutants import Mutant

SWEEP = "RUN_MODE=comm LAB_SWEEP_MIB=0.25 LAB_VARIANT="
RINGS, DIRECTS, TREES, SERVERS = (SWEEP + name for name in ("ring", "direct", "tree", "server"))
FLAT = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=flat"
SAVING = FLAT + " LAB_CHECKPOINT_EVERY=2"
RING, DIRECT, TREE, ROOTED, PRIMITIVES = (
    "distlab/collectives/ring.py",
    "distlab/collectives/direct.py",
    "distlab/collectives/tree.py",
    "distlab/collectives/rooted.py",
    "distlab/collectives/autograd.py",
)
CALLS = LEDGER = SOCKETS = "distlab/measure/traffic.py"
POSITION = "distlab/checkpoint/manifest.py"

MUTANTS = [
    Mutant(RING, "torch.add(incoming, part, out", "torch.add(incoming, part * (not last), out", RINGS),
    Mutant(DIRECT, "add_up([chunks[peers.rank], *parts]", "add_up([*parts, parts[0] * 0]", DIRECTS),
    Mutant(DIRECT, "for block in blocks[2:]:", "for block in blocks[3:]:", DIRECTS),
    Mutant(DIRECT, "(peer, chunks[peer]) for peer", "(peer, chunks[peer].clone()) for peer", DIRECTS),
    Mutant(TREE, "self.tensor.add_(incoming)", "self.tensor.add_(0)", TREES),
    Mutant(TREE, "kept.add_(incoming)", "kept.copy_(incoming)", TREES),
    Mutant(TREE, "chunks[rank].copy_(place)", "chunks[rank].add_(place)", TREES),
    Mutant(ROOTED, "fold(tensor, place, out=tensor)", "fold(tensor, even, out=tensor)", SERVERS),
    Mutant(ROOTED, "copy_own(tensors[root], place)", "place.add_(tensors[root])", SERVERS),
    Mutant(PRIMITIVES, "return torch.stack(received)", "return rows.clone()", RINGS),
    Mutant(
        PRIMITIVES,
        'return linear(x, forward_map, forward_map if loss == "own" else lambda gradient: gradient)',
        "return linear(x, forward_map, forward_map)",
        RINGS,
    ),
    Mutant(CALLS, "return 2 * others if", "return 1.5 * others if", FLAT),
    Mutant(CALLS, "return float(nbytes)", "return 0.75 * nbytes", FLAT),
    Mutant(LEDGER, "            if peer != self.rank:", "            if peer not in (self.rank, 1):", FLAT),
    Mutant(SOCKETS, "sent - retransmitted + waiting, ", "(sent - retransmitted + waiting) // 2, ", FLAT),
    Mutant(POSITION, "generator.set_state(", "torch.Generator().set_state(", SAVING),
    Mutant(POSITION, "bytes(each.get_state()", "bytes(torch.Generator().get_state()", SAVING),
]
