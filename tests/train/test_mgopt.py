"""MG/Opt, a script of notebooks/examples: the cycle against one in plain loops, its fixed points, its cost, and a run of it."""

import functools
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from networks import F64, assert_close, dense_classifier, mesh, normal

import lp_jax
from conftest import jax_defaults
from lp_jax import nn, train

SCRIPT = Path(__file__).resolve().parents[2] / "notebooks" / "examples" / "mgopt.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
mgopt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mgopt)

network = functools.partial(dense_classifier, 8)
pytestmark = pytest.mark.usefixtures("standard_promotion")

SERIAL = lp_jax.Serial()
BATCH = np.asarray(normal((8, 3))), np.arange(8) % 2


def test_coarsening_undoes_refinement():
    for factor, t1 in ((2, 2.0), (3, (0.0, 0.5, 0.6, 1.5, 2.0))):
        trunk = nn.LayerParallel(
            lambda rngs: nn.DenseResidual(5, rngs=rngs), 4, t1=t1, rngs=nnx.Rngs(0)
        )
        back = nn.coarsen(nn.refine(trunk, factor), factor)
        assert back.num_layers == 4
        np.testing.assert_allclose(np.asarray(back.t1), np.asarray(trunk.t1), rtol=1e-15)
        assert_close(nnx.state(back, nnx.Param), nnx.state(trunk, nnx.Param), 1e-7)
    layers = {"w": normal((6, 2))}
    assert_close(nn.coarsen(layers, 3)["w"], layers["w"].reshape(2, 3, 2).mean(axis=1), 1e-15)
    with pytest.raises(ValueError, match="factor must divide the number of layers; got 4 and 6"):
        nn.coarsen(layers, 4)
    with pytest.raises(TypeError, match=r"nn\.coarsen\(model\.trunk\)"):
        nn.coarsen(network())


SEARCH = train.Backtracking(trials=5)


def plain_cycle(
    losses, like, optimizer, states, params, *, pre=1, post=1, coarsest=2, line_search=SEARCH
):
    """One cycle in Python's own loops; parameters, and the number of fine gradients.

    ``losses``: from fine to coarse, each with its gradient; ``like``: parameters of each level.
    """
    spent, tree = 0.0, optax.tree
    start_of, prolonged, transposed = (
        functools.partial(jax.tree.map, lambda x, y, f=f: x if x.shape == y.shape else f(x))
        for f in (
            lambda x: (x[::2] + x[1::2]) / 2,
            lambda x: np.repeat(x, 2, axis=0),
            lambda x: x[::2] + x[1::2],  # of prolonged
        )
    )

    def gradient(level, v, at):
        nonlocal spent
        spent += 0.5**level
        return tree.sub(losses[level](at)[1], v)

    def step(level, at, g):
        updates, states[level] = jax.jit(optimizer.update)(g, states[level], at)
        return tree.add(at, updates)

    def cycle(level, v, at, known=None):
        nonlocal spent
        if level == len(losses) - 1:
            for _ in range(coarsest):
                at, known = (
                    step(level, at, gradient(level, v, at) if known is None else known),
                    None,
                )
            return at
        g = gradient(level, v, at) if known is None else known
        for _ in range(pre):
            at = step(level, at, g)
            g = gradient(level, v, at)
        start = start_of(at, like[level + 1])
        g_coarse = transposed(g, start)
        v_coarse = tree.sub(gradient(level + 1, tree.zeros_like(start), start), g_coarse)
        learnt = cycle(level + 1, v_coarse, start, g_coarse)
        direction = prolonged(tree.sub(learnt, start), at)

        def value(at):
            return losses[level](at)[0] - tree.vdot(v, at)

        length, before, slope = 1.0, value(at), min(0.0, tree.vdot(g, direction))
        if line_search is not None:
            for _ in range(line_search.trials):
                spent += 0.5**level / 3
                if value(tree.add_scale(at, length, direction)) <= before + 1e-4 * length * slope:
                    break
                length /= 2
            else:
                length = 0.0
        at = tree.add_scale(at, length, direction)
        for _ in range(post):
            at = step(level, at, gradient(level, v, at))
        return at

    return cycle(0, tree.zeros_like(params), params), spent


CASES = {
    "three levels": {"levels": 3, "pre": 2, "post": 2},
    "Adam, no search": {"optimizer": optax.adam(1e-2), "line_search": None, "post": 0},
    "steps too long": {"optimizer": optax.sgd(30.0), "pre": 0, "post": 0, "coarsest": 3},
    "two devices": {"pre": 0, "coarsest": 1},  # a small program
}


def losses_of(models, solver):
    """Losses and parameters of networks from fine to coarse, as the script has them."""
    pairs = [train.classification(model) for model in models]
    losses = [lambda p, batch, f=f: f(p, batch, solver, solver)[0] for f, _ in pairs]
    return losses, [params for _, params in pairs]


@pytest.mark.parametrize("name", CASES)
def test_a_cycle_is_that_of_plain_loops(name):
    """Three cycles, with what each leaves behind for the next one; on devices by solves that take part of the layers each."""
    case = {"optimizer": optax.sgd(0.3, momentum=0.5)} | CASES[name]
    optimizer, levels = case.pop("optimizer"), case.pop("levels", 2)
    solver, where = (lp_jax.Picard(sweeps=8), mesh(2)) if name == "two devices" else (SERIAL, None)
    models = mgopt.levels_of(network(comm=where, solver=solver), levels)
    own, like = losses_of(models, solver)
    cycle = mgopt.make_cycle(own, like, optimizer, **case)
    at, opt_states = like[0], [optimizer.init(each) for each in like]
    exact, like = losses_of([dense_classifier(8 // 2**level) for level in range(levels)], SERIAL)
    losses = [
        jax.jit(jax.value_and_grad(functools.partial(lambda f, p: f(p, BATCH), f))) for f in exact
    ]
    states = [optimizer.init(each) for each in like]
    params = jax.tree.map(np.array, at)
    for _ in range(3):
        loss = losses[0](params)[0]
        params, spent = plain_cycle(losses, like, optimizer, states, params, **case)
        at, opt_states, metrics = cycle(at, opt_states, BATCH)
        assert_close(at, params, 1e-10)
        assert_close(metrics["loss"], loss, 1e-12)
        np.testing.assert_allclose(float(metrics["gradients"]), spent, rtol=1e-6)
    assert at["trunk"]["layers"]["inner"]["kernel"].sharding.num_devices == (2 if where else 1)


def test_where_the_gradient_is_zero_nothing_moves():
    """The corrected coarse problem has its minimum where the fine one has it, whatever the coarse network's own gradient."""

    def loss(params, batch):
        target = jnp.linspace(0.0, 1.0, len(params), dtype=F64) ** 2
        return jnp.mean((params - target) ** 2)

    best = jnp.linspace(0.0, 1.0, 8, dtype=F64) ** 2
    like = [jnp.linspace(-1.0, 2.0, layers, dtype=F64) for layers in (8, 4, 2)]
    optimizer = optax.sgd(1.0)
    cycle = mgopt.make_cycle([loss] * 3, like, optimizer)
    params, states = like[0], [optimizer.init(each) for each in like]
    assert jnp.max(jnp.abs(params - best)) > 0.5
    for _ in range(100):  # it is reached from elsewhere
        params, states, _ = cycle(params, states, None)
    assert_close(params, best, 1e-8)
    assert_close(cycle(best, states, None)[0], best, 1e-15)


def test_a_search_that_fails_keeps_the_parameters_and_says_so():
    losses, like = losses_of(mgopt.levels_of(network()), SERIAL)
    optimizer, search = optax.sgd(1e4), train.Backtracking(trials=2)
    cycle = mgopt.make_cycle(losses, like, optimizer, pre=0, post=0, coarsest=3, line_search=search)
    after, _, metrics = cycle(like[0], [optimizer.init(each) for each in like], BATCH)
    assert bool(metrics["stuck"]) and int(metrics["trials"]) == 2
    jax.tree.map(np.testing.assert_array_equal, after, like[0])


def test_layers_that_cannot_be_halved_as_often_are_refused():
    too_coarse = "factor must divide the number of layers; got 2 and 1 layers"
    with pytest.raises(ValueError, match=too_coarse):
        mgopt.levels_of(network(), levels=5)


def test_the_script_trains_and_compares(capsys):
    with jax_defaults():
        mgopt.main(["--layers", "4", "--cycles", "30", "--width", "4"])
    found = re.findall(r"loss (\d+\.\d+) after", capsys.readouterr().out)
    assert len(found) == 2 and all(float(loss) < 1.2 for loss in found)  # log 5 = 1.6 at first
