"""The modules that a process imports before it forks the ranks of the tests' pools and the programs of tests/warm.py, so
that their 5 s of a core are needed once and not once per rank.

torch imports its compiler with the first optimizer or DDP, which takes 2.5 s of a core per rank. The modules of `check`
and `prove` take 0.3 s, a third of the time to check a small script.
"""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # as in a run: distlab/cli/run.py
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # for groups that a test makes, as in a run

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
gc.freeze()  # these objects stay shared, because later collections do not visit them

__all__ = ["fault_injection", "proof", "rank_supervisor", "run_all", "torch"]
