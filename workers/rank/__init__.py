"""A rank's life: how it starts, on which device and over which links, and how it ends.

start.py      what it refuses before it joins, then the experiment
end.py        records brought together, judged and drawn; last words when the cluster breaks
device.py     where its tensors live
link_rate.py  how slow its links really are
fast_lane.py  a second group over a faster part of a slow link
"""
