"""What every rank of the pool has imported before it is forked: 1.5 s of a core once, not once a rank."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of all threads, as in a run: workers/__main__.py
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # of groups that a test makes; as a run sets it

import torch
import torch.distributed

from workers.passes import measure

__all__ = ["measure", "torch"]
