"""A rank's life: how it starts, on which device and over which links, and how it ends.

main.py            the numbered steps, from what it refuses before it joins to the experiment's end
mode_loader.py     a mode by its name or path, and what else is loaded before the run
preflight.py       why these settings cannot run, and a warning where they may not fit
*_self_test.py     meters, transport and judge, each tried on known cases before they decide
fault_injection.py the faults of LAB_FAULTS, made and compared with what was expected
rejoin.py          how a restarted rank comes back into an elastic run
finish.py          the rest of the records, judged and drawn; last words when the cluster breaks
"""
