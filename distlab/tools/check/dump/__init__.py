"""Find why a job hung from the dumps that it left: `distlab check --dump DIR`."""
