"""A user's own script, watched: which rank waits for whom at which line, which calls do not match, who sent what.

    distlab check SCRIPT     settings -> join -> [ script | its supervisor ] on each rank -> findings -> exit code

start/  the script runs unchanged in a process of its own (script.py) beside the supervisor of its rank
        (script_process.py, rank_supervisor.py)
watch/  there each of its calls is recorded before it is made (recorder.py); the records go through a pipe, which
        outlives its writer (telling.py)
judge/  the coordinator of rank 0 (coordinator.py) compares what all ranks have told (rank_state.py, matching.py,
        deadlock.py, silent_faults.py)
"""
