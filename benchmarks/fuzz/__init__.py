"""What arrives from outside, thrown at the lab by the thousand: a table of what was sent and what it changed.

Every file of this folder is one fuzz, run by `python -m benchmarks.fuzz NAME`, with a `main(words)` that prints its
table and returns 0 if nothing was broken; each is seeded and bounded.
"""
