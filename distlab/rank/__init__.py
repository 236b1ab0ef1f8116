"""A rank's life: how it starts, on which device and over which links, and how it ends.

start.py      from what it refuses before it joins to the experiment's end
modes.py      a mode by its name or path
refusals.py   why these settings cannot run in it
sections.py   what rank 0 tells while the run goes on
end.py        the rest of the records, judged and drawn; last words when the cluster breaks
device.py     where its tensors live
link_rate.py  how slow its links really are
"""
