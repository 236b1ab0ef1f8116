"""The workload: models, data and optimizer, and the same training steps in a single process."""
