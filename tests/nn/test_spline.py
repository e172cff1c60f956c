"""Weights as functions of depth, and networks made deeper: against SciPy's B-splines, plain loops, and orders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.interpolate
from compiled import compiled
from flax import nnx
from networks import F64, BatchNormed, assert_close, mesh, normal
from problems import INJECT

import lp_jax
from lp_jax import nn

LAYERS, WIDTH = 8, 5
EXACT = lp_jax.MGRIT(
    coarsening=2, iterations=4, coarse_step=INJECT
)  # four intervals: exact after four cycles
GRID = np.linspace(0.0, 1.5, LAYERS + 1) ** 2


def dense(rngs):
    return nn.DenseResidual(WIDTH, param_dtype=F64, rngs=rngs)


def make_trunk(*, make=dense, num_layers=LAYERS, **options):
    return nn.LayerParallel(
        make, num_layers, **({"solver": EXACT, "rngs": nnx.Rngs(0), "t1": 2.0} | options)
    )


def params_of(trunk):
    return nnx.to_pure_dict(nnx.state(trunk.layers))


def reference(coefficients, degree, t):
    """All basis functions at ``t`` in [0, 1], by SciPy."""
    spans = coefficients - degree
    knots = np.r_[[0.0] * degree, np.linspace(0, 1, spans + 1), [1.0] * degree]
    return scipy.interpolate.BSpline(knots, np.eye(coefficients), degree)(t)


@pytest.mark.parametrize(
    ("coefficients", "degree"), [(1, 0), (4, 0), (2, 1), (5, 1), (3, 2), (9, 3), (8, 5)]
)
def test_the_basis_is_that_of_scipy(coefficients, degree):
    spline = nn.Spline(coefficients=coefficients, degree=degree)
    for n in (coefficients, 12, 64):
        basis = spline.basis(n)
        np.testing.assert_allclose(
            basis, reference(coefficients, degree, (np.arange(n) + 0.5) / n), atol=1e-15
        )
        np.testing.assert_allclose(basis.sum(1), 1, rtol=1e-15)
        assert basis.min() >= 0 and np.count_nonzero(basis, axis=1).max() <= degree + 1
        if degree > 0 or n % coefficients == 0:
            np.testing.assert_allclose(basis[::-1, ::-1], basis, atol=1e-15)  # both ends alike
    np.testing.assert_allclose(
        spline.basis(3.0 + 5.0 * np.arange(13)), spline.basis(12), atol=1e-14
    )
    middle = (GRID[1:] + GRID[:-1]) / 2 / GRID[-1]
    np.testing.assert_allclose(
        spline.basis(GRID.tolist()), reference(coefficients, degree, middle), atol=1e-14
    )


def loop(params, spline, y, times):
    """The network as a loop, each layer's weights summed over SciPy's basis."""
    middle = (times[1:] + times[:-1]) / 2
    basis = reference(
        spline.coefficients, spline.degree, (middle - times[0]) / (times[-1] - times[0])
    )
    weights = (jnp.tensordot(basis, params["inner"][name], 1) for name in ("kernel", "bias"))

    def body(y, x):
        kernel, bias, dt = x
        return y + dt * jnp.tanh(y @ kernel + bias[None]), None

    return jax.lax.scan(body, y, (*weights, np.diff(times)))[0]


@pytest.mark.parametrize(
    ("where", "layers", "degree"), [("one device", LAYERS, 2), ("mesh, uneven", 6, 3)]
)
def test_gradients_are_those_of_a_loop(where, layers, degree):
    spline, comm = (
        nn.Spline(coefficients=5, degree=degree),
        None if where == "one device" else mesh(),
    )
    times = np.linspace(0.0, 2.0, layers + 1) if comm else GRID
    trunk = make_trunk(num_layers=layers, weights=spline, t1=2.0 if comm else GRID, comm=comm)
    trunk.layers.inner.bias[...] = normal((spline.coefficients, WIDTH), 3)
    y, target = normal((3, WIDTH)), normal((3, WIDTH), 2)

    def loss(y1):
        return jnp.sum((y1 - target) ** 2)

    got = nnx.jit(nnx.value_and_grad(lambda trunk, y: loss(trunk(y)), argnums=(0, 1)))(trunk, y)
    wanted = jax.jit(
        jax.value_and_grad(lambda params, y: loss(loop(params, spline, y, times)), argnums=(0, 1))
    )(jax.tree.map(np.asarray, params_of(trunk)), y)
    by_trunk, by_state = got[1]
    assert_close((got[0], (nnx.to_pure_dict(by_trunk)["layers"], by_state)), wanted, rtol=1e-11)
    assert by_trunk["layers"]["inner"]["kernel"][...].shape == (spline.coefficients, WIDTH, WIDTH)


def test_every_device_makes_the_weights_of_its_own_layers():
    """No array of all layers in the program of a device, forward or backward."""
    layers, width = 16, 7
    make = lambda rngs: nn.DenseResidual(width, param_dtype=F64, rngs=rngs)  # noqa: E731
    spline = nn.Spline(coefficients=5)
    trunk = make_trunk(
        make=make, num_layers=layers, weights=spline, solver=lp_jax.Picard(), comm=mesh()
    )
    graphdef, state = nnx.split(trunk)
    gradient = jax.jit(jax.grad(lambda state, y: jnp.sum(nnx.merge(graphdef, state)(y))))
    text = compiled(gradient.lower(state, normal((3, width)))).as_text()
    assert f"f64[{layers // 4},{width},{width}]" in text
    assert f"f64[{layers},{width},{width}]" not in text

    kernel = make_trunk(weights=nn.Spline(coefficients=4), comm=mesh()).layers.inner.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, WIDTH, WIDTH)}


def test_low_precision_is_not_that_of_the_basis():
    """bfloat16 coefficients are summed in float32: a constant stays constant."""
    make = lambda rngs: nn.DenseResidual(WIDTH, param_dtype=jnp.bfloat16, rngs=rngs)  # noqa: E731
    trunk = make_trunk(make=make, num_layers=50, weights=nn.Spline(coefficients=9))
    trunk.layers.inner.bias[...] = jnp.full((9, WIDTH), 1.37, jnp.bfloat16)
    for layer in nn.unstack(trunk):
        assert layer["inner"]["bias"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(layer["inner"]["bias"], trunk.layers.inner.bias[0])


def test_refined_lists():
    params = {
        "w": jnp.asarray([[1.0, 10.0], [3.0, 20.0], [2.0, 40.0]]),
        "n": jnp.asarray([1.0, 2.0, 4.0]),
    }

    @jax.jit
    def refined(w, n):
        linear = [nn.refine(x, 2, how="linear") for x in (n, n[:1], n.astype(jnp.bfloat16))]
        return nn.refine({"w": w, "n": n}, 3), *linear

    thrice, linear, one, low = refined(**params)
    jax.tree.map(
        lambda got, x: np.testing.assert_array_equal(got, np.repeat(x, 3, axis=0)), thrice, params
    )
    np.testing.assert_allclose(linear, [0.75, 1.25, 1.75, 2.5, 3.5, 4.5], rtol=1e-15)
    np.testing.assert_array_equal(one, [1, 1])
    assert low.dtype == jnp.bfloat16


def middles(n):
    return (np.arange(n) + 0.5) / n


class Rate(nnx.Module):
    """Euler's step for y' = a(t) y."""

    def __init__(self, rngs):
        self.a = nnx.Param(jax.random.normal(rngs.params(), (), F64))

    def __call__(self, y, t, dt):
        return y + dt * self.a[...] * y


@pytest.mark.parametrize("how", ["constant", "linear"])
def test_a_refined_network_solves_the_same_ode(how):
    """To first order, as Euler does; and with half the error."""
    exact, distances = np.exp((1 - np.cos(2)) / 2 + 0.1), []
    for n in (64, 128):
        trunk = nn.LayerParallel(Rate, n, solver=lp_jax.Serial(), rngs=nnx.Rngs(0))
        trunk.layers.a[...] = jnp.asarray(np.sin(2 * middles(n)) + 0.3 * middles(n) ** 2)
        y1, refined = (
            float(network(jnp.ones(()))) for network in (trunk, nn.refine(trunk, how=how))
        )
        distances.append(np.abs([refined - y1, y1 - exact, refined - exact]))
    np.testing.assert_allclose(np.log2(np.divide(*distances)), 1, atol=0.1)
    np.testing.assert_allclose([d[2] / d[1] for d in distances], 0.5, atol=0.02)


def test_a_refined_trunk_has_the_same_settings():
    trunk = make_trunk(
        make=BatchNormed, t0=0.5, comm=mesh(), adjoint_solver=lp_jax.Picard(sweeps=3)
    )
    trunk.layers.norm.mean[...] = normal((LAYERS, WIDTH))
    kernel, finer = np.asarray(trunk.layers.linear.kernel[...]), nn.refine(trunk, 2, "linear")
    for name in ("t0", "t1", "solver", "adjoint_solver", "comm", "weights"):
        assert getattr(finer, name) == getattr(trunk, name)
    assert (trunk.num_layers, finer.num_layers) == (8, 16)
    new = finer.layers.linear.kernel[...]
    assert_close(new, nn.refine(jnp.asarray(kernel), 2, "linear"), rtol=1e-15)
    assert_close(trunk.layers.linear.kernel[...], kernel, rtol=0)
    assert {shard.data.shape for shard in new.addressable_shards} == {(4, WIDTH, WIDTH)}
    np.testing.assert_array_equal(
        finer.layers.norm.mean[...], np.repeat(trunk.layers.norm.mean[...], 2, axis=0)
    )


def test_layers_of_different_lengths_are_each_cut_into_equal_parts():
    trunk = make_trunk(make=Rate, t1=GRID, solver=lp_jax.Serial())
    trunk.layers.a[...] = jnp.asarray(1 + 2 * (GRID[1:] + GRID[:-1]) / 2)
    finer = nn.refine(trunk, 3, "linear")
    wanted = np.interp(np.arange(25) / 3, np.arange(9), GRID)
    np.testing.assert_allclose(finer.t1, wanted, rtol=1e-14)
    np.testing.assert_allclose(
        finer.layers.a[...], 1 + 2 * (wanted[1:] + wanted[:-1]) / 2, rtol=1e-13
    )
    assert float(finer(jnp.ones(()))) > float(trunk(jnp.ones(())))


def test_a_spline_is_evaluated_at_more_layers():
    trunk = make_trunk(weights=nn.Spline(coefficients=5))
    finer = nn.refine(trunk)
    assert_close(params_of(finer), params_of(trunk), rtol=0)
    kernels = np.stack([layer["inner"]["kernel"] for layer in nn.unstack(finer)])
    wanted = np.einsum("nk,kij->nij", reference(5, 3, middles(16)), trunk.layers.inner.kernel[...])
    np.testing.assert_allclose(kernels, wanted, rtol=1e-13, atol=1e-14)


FOUR = nn.Spline(coefficients=4)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: nn.Spline(coefficients=3),
            ValueError,
            r"at least degree \+ 1 = 4, as many as a polynomial.*got 3",
        ),
        (
            lambda: nn.Spline(coefficients=3, degree=-1),
            ValueError,
            "degree must be at least 0; got -1",
        ),
        (
            lambda: nn.Spline(coefficients=3.0, degree=1),
            TypeError,
            "coefficients must be an integer",
        ),
        (
            lambda: make_trunk(weights=nn.Spline(coefficients=9)),
            ValueError,
            "more coefficients than.*num_layers=8",
        ),
        (
            lambda: make_trunk(weights="spline"),
            TypeError,
            r"weights must be None or a spline, like nn.Spline",
        ),
        (
            lambda: make_trunk(make=BatchNormed, weights=FOUR),
            ValueError,
            "LayerParallel without a spline",
        ),
        (lambda: FOUR.basis(0), ValueError, "layers must be at least 1"),
        (
            lambda: make_trunk(weights=FOUR, t1=[0.0, 1, 2])(normal((3, 5))),
            ValueError,
            "t1 must be a scalar, or the 9",
        ),
        (lambda: nn.refine(jnp.ones(4), 0), ValueError, "factor must be at least 1"),
        (
            lambda: nn.refine(jnp.ones(4), how="cubic"),
            ValueError,
            "how must be 'constant' or 'linear' or 'zeros'; got",
        ),
        (lambda: nn.refine({"a": jnp.ones(4), "b": jnp.ones(3)}), ValueError, "one leading length"),
        (
            lambda: nn.refine(nn.Network()),
            TypeError,
            "got Network. Take the trunk that it holds: model.trunk = nn.refine",
        ),
    ],
)
def test_bad_input_is_refused(build, error, message):
    with pytest.raises(error, match=message), jax.numpy_dtype_promotion("standard"):
        build()
