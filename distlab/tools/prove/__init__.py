"""`distlab prove FILE`: whether N ranks compute what one process computes, for a model or a strategy of one's own.

A proof runs as a check does (distlab/tools/check): someone's code in a process of its own, its doctor beside it. What
is added is the one process, and by which tensor, on which rank and by which factor the ranks part from it.
"""
