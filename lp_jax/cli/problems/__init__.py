"""The problems that ``lp-jax train`` knows: one module each, named like the command, with its `PROBLEM`."""
