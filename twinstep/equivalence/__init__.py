"""Are two functions the same? What is measured, how much it may be, and the likely cause where it is more."""
