"""The instruments: are two functions the same, and what do they send? Any JAX functions; nothing of this model."""
