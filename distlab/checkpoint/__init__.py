"""Checkpoints that survive: sharded, atomic, checked, and read again by any number of ranks.

    manifest.py   what a checkpoint says of itself: settings, steps, data position, losses, files and their checksums
    course.py     where a run stands in its data, and which samples it has seen
    dcp.py        a strategy's state to torch.distributed.checkpoint and back
    writing.py    one checkpoint, written by all ranks: everything of it or nothing
    saver.py      when: every LAB_CHECKPOINT_EVERY steps, beside the training or before it goes on, the last ones kept
    finding.py    the one to go on from: the newest that is whole and of the same model and data
    proofs.py     what a save and a choice claim, each looked at by another way than it was made
    resuming.py   all variants, generators and positions as they were
    rescue.py     what a failing rank saves by itself
    drill.py      the proof: stopped and resumed is the same as never stopped

A run that neither saves nor resumes imports of all this the course alone.
"""
