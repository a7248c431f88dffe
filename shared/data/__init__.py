"""Texts, and batches as a pure function of (seed, step)."""
