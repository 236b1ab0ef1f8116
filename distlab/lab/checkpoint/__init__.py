"""Checkpoints: sharded, atomic, verified, and loadable by any number of ranks.

    manifest.py   a run's position in its data, and a checkpoint's manifest: settings, losses, checksums
    storage.py    one checkpoint, written by all ranks with torch.distributed.checkpoint: everything of it or nothing
    save.py       every LAB_CHECKPOINT_EVERY steps, beside the training or before it continues; what a save claims is
                  checked by another way than it was made
    locate.py     the one to resume from: the newest that is whole and of the same model and data
    resume.py     all variants, random states and positions as they were, and the proof: stopped and resumed is the
                  same as never stopped
    bugs.py       wrong saves and resumes, which the checks have to catch

A run that neither saves nor resumes imports manifest.py alone.
"""
