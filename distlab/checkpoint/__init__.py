"""Checkpoints: sharded, atomic, checked, and read again by any number of ranks.

    manifest.py            what a checkpoint says of itself: settings, steps, data position, losses, files, checksums
    training_position.py   where a run is in its data, and which samples it has seen
    dcp.py                 a strategy's state to torch.distributed.checkpoint and back
    storage.py             one checkpoint, written by all ranks: everything of it or nothing
    save.py                every LAB_CHECKPOINT_EVERY steps, beside the training or before it continues; emergency saves
    locate.py              the one to resume from: the newest that is whole and of the same model and data
    resume.py              all variants, random states and positions as they were
    checks.py              what a save and a choice claim, each looked at by another way than it was made
    bugs.py                wrong saves and resumes, which the checks have to catch
    resume_proof.py        the proof: stopped and resumed is the same as never stopped

A run that neither saves nor resumes imports training_position.py and manifest.py alone.
"""
