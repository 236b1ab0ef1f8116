"""On rank 0: what all ranks have told, compared."""
