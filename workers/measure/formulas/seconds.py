"""What a step takes: compute, messages as T = rounds·α + bytes/B, what of them is hidden, and the bubble.

Estimates, not checks: they tell a strategy that is bound by its link from one that is bound by its cores. Sources:
compute Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1; with recomputation Narayanan et al.
2021, "Megatron-LM", section 5.1; α and B Thakur et al. 2005, section 3 (see collectives.py).
"""

# Heading and columns of the table in which `comm` leaves what it fitted, for whoever calculates with it.
FITTED = "T = rounds·α + bytes/B, fitted to the all_reduce"
LATENCY, RATE = "α, us", "B, GB/s"


def training_flops(num_parameters: float, tokens: float, recompute: str = "none") -> float:
    """6·P a token, 2 forward and 4 backward; 8·P if the whole forward pass is done again. Attention's own s·s is left
    out."""
    return (8 if recompute == "full" else 6) * num_parameters * tokens


def attention_flops(num_layers: int, width: int, seq: int, tokens: float, recompute: str = "none") -> float:
    """Attention's own s·s under a causal mask: forward 2·s·h a token and layer, two products of which half is masked;
    backward twice that, and forward once more if that is done again."""
    return (8 if recompute == "full" else 6) * num_layers * width * seq * tokens


def message_seconds(rounds: float, nbytes: float, latency_s: float, bytes_per_s: float) -> float:
    """T = rounds·α + bytes/B for what follows each other on one link."""
    return rounds * latency_s + nbytes / bytes_per_s


def exposed_seconds(communication_s: float, hidden_under_s: float) -> float:
    """What is left of a communication that runs beside so much compute."""
    return max(0.0, communication_s - hidden_under_s)


def step_seconds(compute_s: float, bubble: float, exposed_s: float) -> float:
    """A rank's compute stretched by its pipeline's bubble (a share of the whole), then what no compute hides."""
    return compute_s / (1 - bubble) + exposed_s
