"""How training is distributed, by hand: a technique a folder with its mechanism, its strategy and its cost formulas."""
