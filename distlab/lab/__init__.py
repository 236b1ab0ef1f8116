"""The parts that carry a run: its settings, ranks and workload, and the checks, meters and records around them."""
