"""Import what each rank of a pool needs before it is forked, in a process that does nothing else.

That process, a fork server, has no threads and has not computed: torch and OpenMP start theirs when they first
compute, and a fork would inherit their locks in locked state. So forking from it is safe, unlike from pytest, where
xdist has threads and a test may have computed.
"""

import gc
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts all processes of its kernel's group, this one too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; beyond one thread each they take turns
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve

import torch  # noqa: E402
import torch.distributed  # noqa: E402

from distlab.tools.ranks import rank  # noqa: E402

gc.collect()
gc.freeze()  # existing objects stay shared, and the collector skips them

__all__ = ["rank", "torch"]
