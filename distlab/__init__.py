"""The public interface: `distlab.ranks` for users' tests; their modes import classes from `distlab.contract`.

torch is not imported here, so that the command `distlab` responds before torch is loaded.
"""

from typing import Any

from distlab.tools.testing import ranks, same_as_one_process

__all__ = ["batch", "load_ipython_extension", "ranks", "same_as_one_process"]


def batch(*tensors: Any) -> Any:
    """Return a batch that a script has made, unchanged; under `distlab prove` the reference gets the batches of all
    ranks."""
    return tensors[0] if len(tensors) == 1 else tensors


def load_ipython_extension(shell: object) -> None:
    """Load the magics `%%ranks` and `%ranks` for `%load_ext distlab` in a notebook."""
    from distlab.tools.notebook.magics import load

    load(shell)
