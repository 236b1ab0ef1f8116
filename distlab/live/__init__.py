"""A run shown while it goes on: a page on the loopback, made of what the ranks leave in the run's folder.

Whoever serves it reads files and nothing else, so that a container that sees runs/ read-only can do it, and nothing
that comes over the network reaches a rank. No rank imports this.
"""
