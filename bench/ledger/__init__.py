"""What a step sends: predicted, traced, compiled, matched and measured."""
