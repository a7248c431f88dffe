"""What both twins stand on: configuration, model, data, placement, and the proof that they are the same step."""
