"""The package that a container starts: `python -m workers`, the same as `distlab`, by default `run`."""
