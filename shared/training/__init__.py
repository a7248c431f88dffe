"""The training loop, and what it shows."""
