"""Rank 0's side of check: compares what all ranks report."""
