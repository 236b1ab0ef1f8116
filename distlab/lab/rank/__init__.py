"""A rank's life: how it starts, on which device and over which links, and how it ends.

main.py            the numbered steps, from what it refuses before it joins to the experiment's end
mode_loader.py     a mode by its name or path, and what else is loaded before the run
preflight.py       why these settings cannot run, and a warning where they may not fit
link_speed.py      rate and delay of links that LAB_NET_RATE and LAB_NET_DELAY made slow
fault_injection.py the faults of LAB_FAULTS, made and compared with what was expected
rejoin.py          how a restarted rank comes back into an elastic run
finish.py          the rest of the records, judged and drawn; last words when the cluster breaks
"""
