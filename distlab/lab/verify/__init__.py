"""The passes that run for each variant, one file per pass; `run_all.py` runs them in order, and lists the checks that a
complete run must contain.

proof.py                a few steps in float64 against the reference
timed.py                LAB_STEPS steps of all variants in turn: the training that a checkpoint saves
audit.py                steps of the timed pass, drawn by the seed, against the reference
counted.py              one step of each variant alone: the bytes that it sends and stores
pipeline_checks.py      the schedule that ran, compared with the rules of the papers
silent_corruption.py    hashes compared between all ranks with the same tensors, every LAB_AUDIT_EVERY steps
"""
