"""`distlab drill SCRIPT`: check whether a training script survives a kill and reads every sample once.

The script first runs to its end (the whole run). Then it runs with a fault: a rank is killed or stopped, or its disk is
full. After each fault the script is started again, with the user's arguments for a resume. Every run has a separate
working folder. `recording.py` records in each rank what it trains, `runs.py` starts and ends the ranks, and
`verdict.py` compares each resumed run with the whole run.
"""

FAULTS = ("kill", "kill@save", "term@save", "disk@save")
