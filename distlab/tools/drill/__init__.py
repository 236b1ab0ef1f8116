"""`distlab drill SCRIPT`: whether a training script survives a kill, and reads every sample once.

The script runs whole, then again with a rank killed, stopped or out of disk, and is started again with the user's own
words for a resume, each time in a working folder of its own. `recording.py` writes down in each rank what it trains,
`runs.py` starts the ranks and ends them, `verdict.py` compares what was resumed with the whole run.
"""

FAULTS = ("kill", "kill@save", "term@save", "disk@save")
