"""The lab's own transport, whose operations are tried at start."""

from benchmarks.mutants import Mutant

FLAT = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=flat LAB_BACKEND=tcp"
FOUR = FLAT + " WORLD_SIZE=4"
COPIED = "torch's fake backend, which each call is told to first, has copied the root's own part already"
COLLECTIVES, ROOTED = "distlab/transport/tcp_collectives.py", "distlab/collectives/rooted.py"

MUTANTS = [
    Mutant(ROOTED, "fold(tensor, place, out=tensor)", "tensor.add_(place)", FLAT),
    Mutant(COLLECTIVES, "ReduceOp.MIN: torch.minimum", "ReduceOp.MIN: torch.maximum", FLAT),
    Mutant(ROOTED, "fold(tensor, place, out=tensor)", "turn and fold(tensor, place, out=tensor)", FLAT),
    Mutant(ROOTED, "    copy_own(tensors[root], place)\n", "", FLAT, COPIED),
    Mutant(ROOTED, "    copy_own(tensor, places[root])\n", "", FLAT, COPIED),
    Mutant(
        "distlab/collectives/direct.py",
        "reversed(_others(peers, tensors))",
        "reversed(_others(peers, [tensors[peers.rank]] * peers.world_size))",
        FLAT,
    ),
    Mutant(
        COLLECTIVES,
        "        if piece.data_ptr() != place.data_ptr():\n",
        "        if piece.data_ptr() == place.data_ptr():\n",
        FLAT,
    ),
    Mutant(COLLECTIVES, "        piece.div_(peers.world_size)", "        piece.div_(peers.world_size - 1)", FLAT),
    Mutant("distlab/collectives/pairwise.py", "return [turn * (rounds + 1)", "return [(turn + 1) * (rounds + 1)", FOUR),
    Mutant("distlab/collectives/pairwise.py", "torch.add(theirs, place, out=theirs)", "theirs.copy_(place)", FOUR),
    Mutant(
        "distlab/transport/handshake.py",
        "if not hmac.compare_digest(said, proof(key, end, purpose, nonces, who)):",
        "if len(said) != PROOF_BYTES:",
        FLAT,
    ),
]
