"""What a container starts: `python -m workers`, the command `distlab` that without a word runs."""
