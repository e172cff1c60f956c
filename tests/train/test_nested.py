"""Nested iteration: deeper networks, and optimizers, that go on where shallower ones ended."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from networks import F64, BatchNormed, assert_close, dense_classifier as model, normal
from problems import relative_error

import lp_jax
from lp_jax import nn, train

pytestmark = pytest.mark.usefixtures("standard_promotion")

X, LABELS = np.asarray(normal((8, 3))), np.arange(8) % 2


def batches(epoch):
    order = np.random.default_rng(epoch).permutation(8)
    return [(X[order[:4]], LABELS[order[:4]]), (X[order[4:]], LABELS[order[4:]])]


def trained(network, optimizer, steps=3):
    loss_fn, params = train.classification(network)
    state, step_fn = train.init_state(params, optimizer), train.make_train_step(loss_fn, optimizer)
    for epoch in range(steps):
        state, _ = step_fn(state, batches(epoch)[0], lp_jax.Serial(), None)
    return state


def gradient(network, params):
    loss_fn, _ = train.classification(network)
    return jax.jit(jax.grad(lambda p: loss_fn(p, batches(0)[0], lp_jax.Serial(), None)[0]))(params)


def test_layers_between_zeros_are_the_same_network():
    shallow = model(t1=(0.0, 0.5, 0.6, 1.5, 2.0))
    for factor in (2, 3):
        deep = model()
        deep.trunk = nn.refine(shallow.trunk, factor, "zeros")
        assert deep.trunk.num_layers == 4 * factor
        np.testing.assert_allclose(deep(X), shallow(X), rtol=1e-13)
        np.testing.assert_allclose(
            np.diff(deep.trunk.t1)[::factor], [0.5, 0.1, 0.9, 0.5], rtol=1e-13
        )
    assert nn.refine(model().trunk, 2, "zeros").t1 == 4.0
    with pytest.raises(ValueError, match="Spline"):
        nn.refine(model(weights=nn.Spline(coefficients=4)).trunk, 2, "zeros")


OPTIMIZERS = {
    "Adam": optax.adam(1e-2),
    "AdamW, clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "RMSprop": optax.rmsprop(1e-2),
}


@pytest.mark.parametrize(
    ("name", "factor"), [("AdamW, clipped", 3), ("momentum", 2), ("RMSprop", 3)]
)
def test_the_optimizer_goes_on_as_if_the_network_had_always_been_deep(name, factor):
    """Layers 1 / factor as long have gradients that are as much smaller, and a mean of squares is smaller by the square."""
    optimizer, network = OPTIMIZERS[name], model()
    state = trained(network, optimizer)
    deep, deeper = train.deepen(network, state, optimizer, factor)
    assert deep.trunk.num_layers == 4 * factor and int(deeper.step) == 3
    _, fresh = train.classification(deep)
    assert jax.tree.map(jnp.shape, deeper.params) == jax.tree.map(jnp.shape, fresh)
    np.testing.assert_array_equal(
        deeper.params["trunk"]["layers"]["inner"]["kernel"][:factor],
        np.stack([state.params["trunk"]["layers"]["inner"]["kernel"][0]] * factor),
    )

    degrees = {"momentum": [1], "RMSprop": [2]}.get(name, [1, 2])
    before, after = (train._nested._slots(each.opt_state, each.params) for each in (state, deeper))
    count = len(before) // len(degrees)
    for i, ((a, _), (b, _)) in enumerate(zip(before, after, strict=True)):
        power = factor ** degrees[i // count]
        wanted = a if a.shape == b.shape else np.repeat(a, factor, axis=0) / power
        np.testing.assert_allclose(b, wanted, rtol=1e-14)
    counts = [x for x in jax.tree.leaves(deeper.opt_state) if x.ndim == 0]
    assert all(int(x) == 3 for x in counts if jnp.issubdtype(x.dtype, jnp.integer))


def test_gradients_of_refined_layers_are_smaller_by_the_factor():
    """What the scaling of moments is for: of a smooth network, to the order of the layers' length."""
    network = model(layers=64)
    state = trained(network, OPTIMIZERS["Adam"], steps=1)
    shallow = gradient(network, state.params)["trunk"]["layers"]["inner"]["kernel"]
    deep, deeper = train.deepen(network, state, OPTIMIZERS["Adam"], 2)
    fine = gradient(deep, deeper.params)["trunk"]["layers"]["inner"]["kernel"]
    assert relative_error(np.repeat(shallow, 2, axis=0), 2 * fine) < 0.05


def test_pairs_of_lbfgs_begin_anew():
    optimizer, network = (
        optax.chain(optax.scale_by_lbfgs(memory_size=3), optax.scale(-0.1)),
        model(),
    )
    _, deeper = train.deepen(network, trained(network, optimizer), optimizer)
    assert int(deeper.opt_state[0].count) == 0
    assert deeper.opt_state[0].diff_params_memory["trunk"]["layers"]["inner"]["kernel"].shape == (
        3,
        8,
        5,
        5,
    )


def test_blocks_are_refined_and_buffers_are_not():
    rngs = nnx.Rngs(0)
    block = functools.partial(
        nn.LayerParallel, lambda rngs: nn.DenseResidual(5, param_dtype=F64, rngs=rngs), rngs=rngs
    )
    network = model()
    network.trunk = nn.Network(
        block(2, solver=lp_jax.Serial()), block(4), lambda y: 2 * y, block(4)
    )
    state = trained(network, OPTIMIZERS["Adam"], steps=1)
    deep, deeper = train.deepen(network, state, OPTIMIZERS["Adam"])
    assert [part.num_layers for part in deep.trunk.parts if hasattr(part, "num_layers")] == [
        2,
        8,
        8,
    ]
    assert np.isfinite(gradient(deep, deeper.params)["opening"]["linear"]["kernel"]).all()
    network.trunk = nn.Network(lambda y: y)
    state = trained(network, OPTIMIZERS["Adam"], steps=0)
    with pytest.raises(TypeError, match=r"LayerParallel.*Network.*recurrent network"):
        train.deepen(network, state, OPTIMIZERS["Adam"])


CYCLES = lp_jax.MGRIT(coarsening=2, iterations=1, coarse_step=lp_jax.Rediscretize())
DEPTHS = [train.Depth(4, 3), train.Depth(8, 2, CYCLES), train.Depth(16, 2, lp_jax.Picard(sweeps=2))]


def run(first, batches=batches, depths=DEPTHS, **options):
    return train.nested(
        first, optax.adam(1e-2), batches, depths, steps_per_epoch=2, log_every=1, **options
    )


def test_depths_follow_each_other_and_go_on_after_a_break_with_the_same_numbers(tmp_path):
    """Stopped in the first depth, where the second begins, and in the last."""
    first = model()
    before = jax.tree.map(np.array, train.classification(first)[1])
    deep, wanted, whole = run(first, folder=tmp_path / "whole")
    assert deep.trunk.num_layers == 16 and int(wanted.step) == 14
    assert_close(
        train.classification(first)[1], before, rtol=0
    )  # the model that was given is left alone
    assert_close(train.classification(deep)[1], wanted.params, rtol=0)
    assert [(row["step"], row["layers"]) for row in whole.of("depth")] == [(0, 4), (6, 8), (10, 16)]
    assert whole.of("depth")[0]["work"] == 4 * 3  # forward, transposed, gradient
    assert [row["epoch"] for row in whole.of("train")] == [e for e in range(7) for _ in range(2)]

    def until(end, epoch):
        for step, batch in enumerate(batches(epoch), 2 * epoch):
            if step == end:
                raise InterruptedError
            yield batch

    folder = tmp_path / "cut"
    for end in (1, 6, 11):
        with pytest.raises(InterruptedError):
            run(model(), functools.partial(until, end), folder=folder, checkpoint_every=1)
        (folder / "16-layers").mkdir(
            exist_ok=True
        )  # as if it had been killed while the folder was made
    _, state, log = run(model(), folder=folder)
    chex.assert_trees_all_equal(state, wanted)
    assert [(row["step"], row["layers"]) for row in log.of("depth")] == [(11, 16)]
    for name in ("step", "epoch", "loss"):  # those that were left to do
        wanted_rows = whole.of("train")[11:]
        assert [row[name] for row in log.of("train")] == [row[name] for row in wanted_rows]
    _, again, _ = run(model(), folder=folder)  # a finished run is left as it is
    assert int(again.step) == 14


def test_depths_that_do_not_follow_are_refused():
    refused = {
        (): "got none",
        (8, 16): "with the model's 4",
        (4, 6): r"multiple.*\[4, 6\]",
        (4, 4): "multiple",
    }
    for layers, words in refused.items():
        with pytest.raises(ValueError, match=words):
            run(model(), depths=[train.Depth(n, 1) for n in layers])


class Numbered(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 5, param_dtype=F64, rngs=rngs)

    def __call__(self, y, t, dt, *, index):
        return y + dt * jnp.where(index < 2, 1.0, -1.0) * self.linear(y)


def test_layers_that_read_their_number_are_refused():
    network = model(layer=Numbered)
    state = trained(network, optax.sgd(0.1), steps=1)
    with pytest.raises(TypeError, match="Numbered reads its number"):
        train.deepen(network, state, optax.sgd(0.1))


def test_running_statistics_go_along():
    """Those of a layer go to all layers in its place, and deeper networks go on updating them."""
    network, optimizer = model(layer=BatchNormed), optax.adam(1e-2)
    state = trained(network, optimizer)
    deep, deeper = train.deepen(network, state, optimizer)

    def means(state):
        return np.array(state.params["trunk"]["layers"]["norm"]["mean"])

    before, after = map(means, (state, deeper))
    np.testing.assert_array_equal(after, np.repeat(before, 2, axis=0))
    step_fn = train.make_train_step(train.classification(deep)[0], optimizer)
    moved, metrics = step_fn(deeper, batches(0)[0], lp_jax.Serial(), None)
    assert bool(metrics.finite) and np.abs(means(moved) - after).max() > 1e-3
