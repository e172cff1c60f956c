"""Timings of lp_jax, with the error and the residual beside each; see README.md."""
