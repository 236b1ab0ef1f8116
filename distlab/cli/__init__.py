"""The commands of `distlab`, a module each; distlab/config/commands.py lists them."""
