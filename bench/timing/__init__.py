"""Times of steps."""
