"""What is done to every variant of a mode, a pass a file; `run_all.py` runs them in their order, and lists the checks
and comparisons that such a run has to have made.

proof.py                a few steps in float64 against the reference
timed.py                LAB_STEPS steps of all variants side by side: the training that a checkpoint saves
audit.py                steps of the timed pass, drawn by the seed, against the reference
counted.py              one step of each variant alone: what it sends and what it keeps
pipeline_checks.py      the schedule that ran, against the rules of the papers
silent_corruption.py    the same hashes on all ranks that keep the same, every LAB_AUDIT_EVERY steps
"""
