"""What the lessons have that is no mode: exercises to fill in, and demonstrations of what goes wrong around ranks.

    distlab lesson                    lists them
    distlab lesson exercise-1         writes its file into exercises/; filled in, the same command runs it on ranks
    distlab lesson fork-bomb          a program without its guard, contained

exercises.py     three exercises: a file with gaps, and what is said of what one has filled in
processes.py     a fork bomb and a zombie, in a process group of their own that ends within a bound
eight_ranks.py   eight ranks that are three times as fast as one, and four ways out
"""
