"""`distlab puzzle`: 20 tasks of distributed training, answered by the learner and judged on real ranks.

task.py says what a task is, tasks/ has them, rank.py runs an answer on one rank, judge.py compares what the ranks did
with one process and with the task's bounds, runner.py brings all of that together, folder.py is the learner's folder.
"""
