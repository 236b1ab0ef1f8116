"""What users bring their own code to: a script, a model, a test, a notebook, an answer to a puzzle."""
