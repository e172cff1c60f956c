"""Floor 2: where the layers live, and every message between workers."""
