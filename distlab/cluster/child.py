"""`python -m distlab.cluster.child PARENT MODULE WORDS...`: what `python -m MODULE WORDS` does, in a process that ends
with its parent.

A report that is drawn by a rank of a broken cluster would outlive the rank, which ends by `os._exit`, and its launcher:
ten of 109 did.
"""

import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL at the death of process `parent`, which started this one; elsewhere than on Linux
    nothing."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(137)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
