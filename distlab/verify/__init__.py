"""What is done to every variant of a mode, a pass a file; `measure.py` runs them in their order.

proof.py      a few steps in float64 against the dense single process
timed.py      LAB_STEPS steps of all variants side by side: the training that a checkpoint saves
counted.py    one step of each variant alone: what it sends and what it holds
profiled.py   one step of each under PyTorch's profiler (LAB_TRACE=1)
timeline.py   from the marks of the timed steps to what each rank did when
replicas.py   what data parallelism claims beside the proof
"""
