"""Faults that a rank injects into itself, each by a mechanism that takes no privilege: LAB_FAULTS says which and when
(distlab/config/fault_spec.py), distlab/rank/fault_injection.py calls them and compares what happens with what should.

injectors.py: the kernel kills, stops or slows the process; it drops what arrives at its sockets, or lets out little;
the disk is full, or a byte of a checkpoint changes; one bit of a tensor, or of one on its way to another rank, flips.
"""
