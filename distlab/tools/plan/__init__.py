"""Pick and predict: memory, bytes and seconds of every strategy for a model on paper, and which one to take.

arguments -> Job (what is asked, every guess stated) -> layouts (how N ranks can be cut) -> costs (by the formulas of
the techniques' costs.py, those that the modes are checked against) -> advice (what fits, what to take, what would fit)
"""
