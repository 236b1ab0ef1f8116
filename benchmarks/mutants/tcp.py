"""The lab's own transport, whose operations are tried at start."""

from benchmarks.mutants import Mutant

FLAT = "RUN_MODE=dp LAB_MODEL=mlp LAB_VARIANT=flat LAB_BACKEND=tcp"
FOUR = FLAT + " WORLD_SIZE=4"
COPIED = "torch's fake backend, which each call is told to first, has copied the root's own part already"
LAYING, ROUTES = "workers/parallel/laying.py", "workers/parallel/routes.py"

MUTANTS = [
    Mutant(
        "workers/parallel/star.py",
        "            fold(tensor, theirs, out=tensor)",
        "            tensor.add_(theirs)",
        FLAT,
    ),
    Mutant(ROUTES, "ReduceOp.MIN: torch.minimum", "ReduceOp.MIN: torch.maximum", FLAT),
    Mutant(
        ROUTES,
        "for message, row in zip(received, rows, strict=True):",
        "for message, row in zip(received[1:], rows[1:], strict=True):",
        FLAT,
    ),
    Mutant(ROUTES, "    place.copy_(tensors[root])\n", "", FLAT, COPIED),
    Mutant(ROUTES, "    places[root].copy_(tensor)\n", "", FLAT, COPIED),
    Mutant(
        ROUTES, "[(peer, tensors[peer]) for peer in others]", "[(peer, tensors[peers.rank]) for peer in others]", FLAT
    ),
    Mutant(
        LAYING,
        "        if piece.data_ptr() != place.data_ptr():\n",
        "        if piece.data_ptr() == place.data_ptr():\n",
        FLAT,
    ),
    Mutant(LAYING, "        piece.div_(peers.world_size)", "        piece.div_(peers.world_size - 1)", FLAT),
    Mutant("workers/parallel/pairs.py", "return [turn * (rounds + 1)", "return [(turn + 1) * (rounds + 1)", FOUR),
    Mutant("workers/parallel/pairs.py", "torch.add(theirs, place, out=theirs)", "theirs.copy_(place)", FOUR),
    Mutant(
        "workers/parallel/handshake.py",
        "if not hmac.compare_digest(said, proof(key, end, purpose, nonces, who)):",
        "if len(said) != PROOF_BYTES:",
        FLAT,
    ),
]
