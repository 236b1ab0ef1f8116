"""What the forward pass of a transformer leaves for its backward pass: layers of b samples, s positions, width h, a
heads.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4.1 to 4.3 and 5.
Theirs is a layer with dropout in 16 bits, so that numbers of 2 bytes stand beside dropout masks of 1; here the size of
a number is free. Embedding, output layer and loss are left out, as in their equations.
"""

RECOMPUTE = ("none", "selective", "full")


def layer_activation_bytes(
    seq: int, samples: int, width: int, heads: int, *, itemsize: int = 2, tensor_ranks: int = 1,
    sequence_parallel: bool = False, recompute: str = "none",
) -> float:  # fmt: skip
    """One layer on one of t ranks. In 16 bits s·b·h(34 + 5as/h); with tensor parallelism s·b·h(10 + 24/t + 5as/(ht)).

    Of the 34 bytes 10 belong to norms, dropouts and inputs of the blocks, which tensor parallelism leaves whole, and
    sequence parallelism cuts too: s·b·h/t(34 + 5as/h). "selective" keeps no scores (flash attention neither): 5as/h
    goes. "full" keeps the layer's input alone, 2·s·b·h.
    """
    tokens, t = seq * samples, tensor_ranks
    if recompute == "full":
        return itemsize * tokens * width / (t if sequence_parallel else 1)
    whole, cut = 4 * itemsize + 2, 12 * itemsize  # 10 and 24: two of the numbers that stay whole are masks of a byte
    scores = (2 * itemsize + 1) * heads * seq / width if recompute == "none" else 0.0
    return tokens * width * (whole / (t if sequence_parallel else 1) + cut / t + scores / t)


def stage_activation_bytes(layer_bytes: float, layers: float, in_flight: int, whole_layer_bytes: float = 0.0) -> float:
    """A stage of `layers` that holds `in_flight` microbatches; `whole_layer_bytes` is what one layer takes that is
    recomputed."""
    return layer_bytes * layers * in_flight + whole_layer_bytes
