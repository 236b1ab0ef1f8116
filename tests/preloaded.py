"""What every rank of the tests' pools, and every program of tests/warm.py, has imported before it is forked: 5 s of a core once,
not once per rank.

torch imports its compiler with the first optimizer or DDP, 2.5 s of a core in each rank that makes one. The modules of
`check` and `prove` take 0.3 s, a third of all that a check of a small script does.
"""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # of all threads, as in a run: distlab/cli/run.py
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # of groups that a test makes; as a run sets it

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from distlab.lab.rank import fault_injection
from distlab.lab.verify import run_all
from distlab.tools.check.start import rank_supervisor
from distlab.tools.prove import proof

gc.collect()
gc.freeze()  # what is there now stays shared, and no collection walks it again

__all__ = ["fault_injection", "proof", "rank_supervisor", "run_all", "torch"]
