"""Floor 1: pytrees, their types and checks, and programs."""
