"""Someone else's script under watch: who waits for whom at which line, which calls do not match, who sent what to whom.

    distlab check train.py        settings -> join -> [ script | its doctor ] on each rank -> findings -> exit code

The script runs unchanged in a process of its own (script.py), where each of its calls is told before it is made
(recording.py). What is told goes through a pipe, which outlives whoever wrote into it, to the doctor of its rank
(bedside.py), and from there to that of rank 0, which compares the ranks (casebook.py, matching.py, waiting.py).
"""
