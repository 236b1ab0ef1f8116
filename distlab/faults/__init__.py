"""Faults that a rank makes on purpose, each by a mechanism that takes no privilege: LAB_FAULTS says which and when
(distlab/config/fault_spec.py), distlab/rank/fault_injection.py calls them and holds what happens to what should.

process.py    the kernel kills, stops or slows the process
links.py      the kernel drops what arrives at its sockets, or lets out little
files.py      the disk is full, a byte of a checkpoint changes
bits.py       one bit of a tensor
messages.py   one bit of a tensor on its way between two ranks
"""
