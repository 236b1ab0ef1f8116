"""Runs a user's script under observation and reports hangs, mismatched collectives and traffic per rank.

    distlab check SCRIPT     settings -> join -> [ script | its supervisor ] on each rank -> findings -> exit code

start/  runs the script unchanged in its own process (script.py), next to the supervisor of its rank
        (script_process.py, rank_supervisor.py)
watch/  records each of its calls before it is made (recorder.py) and writes them to a pipe, which can be read even
        after the script has died (reporter.py)
judge/  compares all ranks' records in the coordinator on rank 0 (coordinator.py, rank_state.py, matching.py,
        deadlock.py, silent_faults.py)
"""
