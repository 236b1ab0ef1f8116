"""The planner: estimate memory, bytes and seconds of every strategy for a model, and recommend one.

arguments -> Job (the question, with every guess stated) -> layouts (how to arrange N ranks) -> costs (by the formulas
of the techniques' costs.py, which the modes are checked against) -> advice (what fits, the choice, remedies)
"""
