"""The instruments: are two functions the same, and what do they send? Any JAX functions; nothing of this model."""

from twinstep.equivalence.compare import assert_equivalent, compare
from twinstep.equivalence.report import Report

__all__ = ["Report", "assert_equivalent", "compare"]
