"""What carries a run: its settings, its ranks, what they train, and the checks, meters and records around them."""
