"""The commands of `distlab`, a module for each; `distlab/config/commands.py` lists them with their help.

A command is started as `python -m distlab.cli.NAME WORDS` would be: its module reads its own words and exits with its
own code. `run.py` reads which command was typed; `run` and `explain` alone take settings as words.
"""
