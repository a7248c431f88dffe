"""`python -m bench compare`: equality, communication and time of both twins."""
