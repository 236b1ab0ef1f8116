"""One card: what of the lab holds on it, and how fast it is. `python3 -m benchmarks.gpu`."""
