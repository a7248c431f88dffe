"""What is trained: the transformer, its loss and optimizer, and the state of a run."""
