"""Cells of a notebook on ranks: `%load_ext distlab`, then `%%ranks 4` above a cell.

magics.py   the magics and their output; only this file imports IPython
session.py  the ranks of a notebook, in its kernel; a coordinator watches each cell
rank.py     one rank: names that stay from cell to cell, and a process group
output.py   a cell's outputs by rank, equal ones once; its faults with the lines of the cell
"""
