"""In the script's process: what it does, told before it is done."""
