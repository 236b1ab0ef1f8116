"""distlab under real engines, on machines made of this one."""
