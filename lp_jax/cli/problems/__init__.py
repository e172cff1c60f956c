"""The problems of ``lp-jax train``: one module each, named like the command, with its `PROBLEM`."""
