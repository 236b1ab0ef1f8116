"""What a container starts: `python -m workers` is the command `distlab`, and starts ranks where no command is given."""
