"""Floor 5: what a layer costs on a device, and the solvers that are fastest there. Solvers do not know it."""
