"""The proof that the twins are the same step."""
