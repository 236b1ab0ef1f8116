"""Warm ranks: processes that are forked once and run works one by one, while a doctor watches for hangs.

pool.py       the ranks, in the process that owns them, and the outcome of a work
rank.py       one rank: its process group, and the loop that runs works
preloaded.py  the imports of each rank before it is forked

A work is a test's body (distlab/tools/testing), a notebook's cell or an answer to a puzzle: each is a Player.
"""
