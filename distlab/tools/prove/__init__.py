"""`distlab prove FILE`: check whether N ranks compute what one process computes, for a user's model or strategy.

A proof runs like a check (distlab/tools/check): the user's code in a separate process, with a supervisor. A proof adds
the single process, and reports which tensor differs from it, on which rank and by which factor.
"""
