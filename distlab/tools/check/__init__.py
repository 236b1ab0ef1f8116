"""A user's own script, watched: which rank waits for whom at which line, which calls do not match, who sent what.

    distlab check SCRIPT     settings -> join -> [ script | its supervisor ] on each rank -> findings -> exit code

The script runs unchanged in a process of its own (script.py), where each of its calls is recorded before it is made
(recorder.py). The records go through a pipe, which outlives its writer, to the supervisor of the rank
(script_process.py, rank_supervisor.py), and from there to the coordinator on rank 0 (coordinator.py), which compares
the ranks (rank_state.py, matching.py, deadlock.py, silent_faults.py, axes.py).
"""
