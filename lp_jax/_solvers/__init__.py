"""Floor 4: the solvers, their driver, and coarse steps."""
