"""What each rank of a lesson has imported before it is forked (distlab/tools/testing/preloaded.py says why)."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; beyond one thread each they take turns
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve

import torch
import torch.distributed

from distlab.tools.check.start import script

gc.collect()
gc.freeze()

__all__ = ["script", "torch"]
