"""The life of a rank: its start, its device and links, and its end.

main.py            the numbered steps, from the refusal of settings to the experiment's end
mode_loader.py     a mode by its name or path, and other imports before the run
preflight.py       why these settings cannot run, and a warning if they may not fit
link_speed.py      rate and delay of links that LAB_NET_RATE and LAB_NET_DELAY have slowed
fault_injection.py the faults of LAB_FAULTS, injected and compared with their expected outcome
rejoin.py          how a restarted rank joins an elastic run again
finish.py          the last records, judged and drawn; a failure report when the cluster breaks
"""
