"""What each rank of a notebook has imported before it is forked (distlab/tools/testing/preloaded.py says why)."""

import gc
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts all processes of its kernel's group, this one too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; beyond one thread each they take turns
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve

import torch  # noqa: E402
import torch.distributed  # noqa: E402

from distlab.tools.notebook import rank  # noqa: E402

gc.collect()
gc.freeze()

__all__ = ["rank", "torch"]
