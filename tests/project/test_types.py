"""Annotations hold: shapes and types are checked while every kind of solver is traced, forward and adjoint."""

import os
import sys

import pytest
from launch import output

# Packages whose functions work on arrays. The others also trace with shapes, batches of tolerances and the like.
CHECKED = [
    "lp_jax._levels",
    "lp_jax._programs._adjoint",
    *(f"lp_jax._solvers.{name}" for name in ("_affine", "_coarse_step", "_cycle")),
]

SCRIPT = f"""
import typing
import beartype, flax, jax, jax.experimental, jax.extend.core, jaxtyping, numpy
typing.TYPE_CHECKING = True  # the names of trees are those that a type checker sees
with jaxtyping.install_import_hook({CHECKED!r}, "beartype.beartype"):
    import lp_jax
import jax.numpy as jnp
from lp_jax import MGRIT, Newton, Picard, Rediscretize, Secant, Serial, Windowed

params = jax.random.normal(jax.random.key(0), (20, 4, 4)) / 3
y0 = {{"a": jnp.ones((3, 4))}}

def step(y, layer):
    return {{"a": y["a"] + layer.dt * jnp.tanh(y["a"] @ layer.params)}}

solvers = [
    Serial(checkpoint_every=5), Secant(sweeps=2), Windowed(sweeps=9, windows=4, rtol=1e-3),
    Picard(sweeps=2, at_once=3), MGRIT(at_once=1),
    MGRIT(levels=3, coarse_step=Rediscretize("mean"), relaxation="FCF", cycle="W"),
    MGRIT(storage="all", coarse_step=Picard(sweeps=1, around="trajectory")), Newton(iterations=2, batch_axes=1),
    Newton(jacobian="shared", iterations=2, batch_axes=1), Newton(jacobian="diagonal", iterations=2, batch_axes=1),
]
for solver in solvers:
    jax.eval_shape(jax.grad(lambda p: jnp.sum(lp_jax.solve(step, p, y0, t1=2.0, solver=solver).y1["a"])), params)
try:  # an annotation that does not hold raises
    lp_jax.multigrid.f_relax(lp_jax.multigrid.hierarchy(lp_jax.Problem(step, params, y0), MGRIT())[0], {{"a": "text"}})
except jaxtyping.TypeCheckError:
    print("checked")
"""


def test_annotations_hold_while_solvers_are_traced():
    for package in ("beartype", "jaxtyping"):
        pytest.importorskip(package, reason=f"{package} comes with the extra lp_jax[test]")
    assert (
        output(sys.executable, "-c", SCRIPT, env=os.environ | {"JAX_PLATFORMS": "cpu"}).strip()
        == "checked"
    )
