"""Programs as users have them, for tests of what XLA makes of them; see `conftest.QUICK`."""

import os

OPTIONS = {"xla_cpu_use_fusion_emitters": True} if "use_fusion_emitters=false" in os.environ["XLA_FLAGS"] else None


def compiled(lowered):
    """Compile by XLA's own settings."""
    return lowered.compile(compiler_options=OPTIONS)
