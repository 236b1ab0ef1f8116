"""The commands of `distlab`, a module for each; `distlab/lab/config/commands.py` lists them with their help.

The `main` of a command's module reads its own words and returns the exit code. `run.py` reads which command was typed;
`run` and `explain` alone take settings as words.
"""
