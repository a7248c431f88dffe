"""The command line of both twins."""
