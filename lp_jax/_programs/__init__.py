"""Floor 6: from a problem to a compiled solve with a gradient of its own."""
