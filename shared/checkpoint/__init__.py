"""Saving and restoring states, verified by a digest of every array."""
