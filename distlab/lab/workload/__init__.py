"""What is trained: models, data, optimizer, and the same steps in one process, dense."""
