"""Distributed tests that end: `@distlab.ranks(4)` runs a test's body on a pool of warm ranks under a doctor's watch."""
