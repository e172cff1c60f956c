"""``python -m lp_jax`` is the command ``lp-jax``."""

from lp_jax.cli import main

if __name__ == "__main__":
    main()
