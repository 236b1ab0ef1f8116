"""Warm ranks: processes that are forked once, run one work after the other, and are watched by a doctor meanwhile.

pool.py       the ranks, in the process that has them, and what became of a work
rank.py       one rank: its process group, and the loop that takes works
preloaded.py  what each rank has imported before it is forked

A work is a test's body (distlab/tools/testing), a notebook's cell or an answer to a puzzle: each is a Player.
"""
