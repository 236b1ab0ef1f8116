"""Mechanisms made into strategies: the loop of passes, update and state around what workers/parallel does by hand.

replica.py    a whole model on each rank, gradients summed
tensor.py     a slice of each layer on each rank
sharded.py    a part of all weights, gradients and optimizer state on each rank
pipelined.py  some layers on each rank; engines.py says how microbatches go through them
"""
