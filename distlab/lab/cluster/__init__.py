"""Ranks as a cluster: they find each other, watch each other, and end together with the same sentence."""

from distlab.lab.report.units import name_ranks

__all__ = ["ClusterError", "name_ranks"]


class ClusterError(Exception):
    """The cluster cannot run; the message is the sentence to print, the exit code is 3."""
