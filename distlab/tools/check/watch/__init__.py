"""In the script's process: records each action before it happens."""
