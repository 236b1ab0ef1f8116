"""What each rank of a pool has imported before it is forked, by a process that does nothing else.

That process, a fork server, has no thread and has computed nothing: torch and OpenMP make theirs when they first
compute, and a fork beside these would inherit their locks held. So forking from it is safe, which forking from pytest
is not: xdist has threads there, and a test may have computed.
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
gc.freeze()  # what is there now stays shared, and no collection walks it again

__all__ = ["rank", "torch"]
