"""The life of a rank: its start, its device and links, and its end.

main.py            the numbered steps, from the refusal of settings to the experiment's end
mode_loader.py     load a mode by its name or path, and import other modules before the run
preflight.py       reasons why these settings cannot run, and a warning if they may not fit into memory
link_speed.py      measure rate and delay of links that LAB_NET_RATE and LAB_NET_DELAY have slowed
fault_injection.py inject the faults of LAB_FAULTS, and record their expected outcome
rejoin.py          how a restarted rank joins an elastic run again
finish.py          collect the last records, judge and draw them; a failure report when the cluster breaks
"""
