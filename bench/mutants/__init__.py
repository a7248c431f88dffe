"""The proof, tried on steps with known mistakes in them."""
