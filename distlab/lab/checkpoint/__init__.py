"""Checkpoints: sharded, atomic, verified, and loadable by any number of ranks.

    manifest.py   a run's position in its data, and a checkpoint's manifest: settings, losses, checksums
    storage.py    write one checkpoint from all ranks with torch.distributed.checkpoint, atomically
    save.py       save every LAB_CHECKPOINT_EVERY steps before training continues, and check each save
    locate.py     find the checkpoint to resume from: the newest complete one of the same model and data
    resume.py     restore all variants, random states and the position in the data, and prove that a resumed run ends in
                  the same weights as an uninterrupted one
    bugs.py       wrong saves and resumes, which the checks have to catch

A run that neither saves nor resumes imports manifest.py alone.
"""
