"""`%load_ext distlab.puzzle` in a notebook: the magics %puzzle and %%puzzle."""

from distlab.tools.puzzle import load_ipython_extension

__all__ = ["load_ipython_extension"]
