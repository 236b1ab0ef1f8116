"""Warm ranks: processes that are forked once and run tasks one by one, while a coordinator looks for hangs.

pool.py       the ranks, in the process that owns them, and the outcome of a task
rank.py       one rank: its process group, and the loop that runs tasks
preloaded.py  the imports of each rank before it is forked

A task is a test's body (distlab/tools/testing), a notebook's cell or an answer to a puzzle; each kind has an Executor.
"""
