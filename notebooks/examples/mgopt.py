r"""MG/Opt: training steps on a shallow network correct those of a deep one. A script to read, to copy and to change.

    python notebooks/examples/mgopt.py --layers 32 --cycles 40

trains by MG/Opt, and for the same work by the optimizer alone, and prints both losses. MG/Opt is multigrid with the
parameters as unknowns. A cycle takes ``pre`` steps of the optimizer on the deep network, hands its problem to a network with
fewer layers, adds the change of that network's parameters, and takes ``post`` steps. The coarse problem is to minimise

    f_H(theta_H) - v . theta_H,    v = grad f_H(R theta) - P^T grad f(theta),

so that its gradient at the start is that of the fine level, restricted. P repeats layers (`nn.refine`), R takes means of them
(`nn.coarsen`), so P^T = factor * R. A line search along P (theta_H - R theta) says how much of that change is taken.

In our measurements it saves nothing (docs/benchmarks.md): at half of the work, the deep network alone was better. The networks
here have one trunk in one process, and no running statistics. With such statistics, your step has to take over ``info.replace``.

Nash, "A multigrid approach to discretized optimization problems", Optimization Methods and Software 14 (2000); von Planta,
Kopanicakova, Krause, "Training of deep residual networks with stochastic MG/OPT", arXiv:2108.04052 (2021).
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, train

TRIAL = 1 / 3  # of a gradient: a trial evaluates each layer once, and a gradient three times


def levels_of(model, levels=2, factor=2):
    """Return the network and shallower ones; each layer of one stands for ``factor`` layers of the one before."""
    models = [model]
    for _ in range(levels - 1):
        coarse = nnx.clone(models[-1])
        coarse.trunk = nn.coarsen(coarse.trunk, factor)
        models.append(coarse)
    return models


def make_cycle(
    losses,
    like,
    optimizer,
    *,
    factor=2,
    pre=1,
    post=1,
    coarsest=2,
    line_search=train.Backtracking(trials=5),
):
    """Return ``cycle(params, opt_states, batch) -> (params, opt_states, metrics)``, a V-cycle on one batch.

    ``losses`` are functions ``loss(params, batch)``, from fine to coarse, and ``like`` are parameters of each level; each level
    has a state of the optimizer. The coarsest takes ``coarsest`` steps. ``line_search=None`` takes the whole correction.
    ``metrics["gradients"]`` is the cost of the cycle in gradients of the deep network, a coarse one by its layers.
    """

    def move(change, level, tree):
        """Bring parameters to a level: those of layers change, and all others stay."""
        return jax.tree.map(lambda x, y: x if x.shape == y.shape else change(x), tree, like[level])

    restrict = functools.partial(nn.coarsen, factor=factor)
    prolong = functools.partial(nn.refine, factor=factor)

    @jax.jit
    def cycle(params, opt_states, batch):
        def at(level, v, params):
            """Return value and gradient of a level's objective."""
            value, gradient = jax.value_and_grad(losses[level])(params, batch)
            return value - optax.tree.vdot(v, params), optax.tree.sub(gradient, v)

        def steps(level, v, number, params, opt_state, known):
            """Take steps of the optimizer; a gradient that nobody asks for in the end is not computed."""
            for _ in range(number):
                updates, opt_state = optimizer.update(known[1], opt_state, params)
                params = optax.apply_updates(params, updates)
                known = at(level, v, params)
            return params, opt_state, known

        def visit(level, v, params, opt_states, known):
            """Improve a level's parameters, at which the objective is ``known``; the cost does not count that."""
            (own, *below), cost = opt_states, factor**-level
            if not below:
                params, own, _ = steps(level, v, coarsest, params, own, known)
                return params, [own], {"gradients": (coarsest - 1) * cost}
            params, own, known = steps(level, v, pre, params, own, known)
            params, below, spent = correct(level, v, params, below, known)
            params, own, _ = steps(level, v, post, params, own, at(level, v, params))
            spent["gradients"] += (pre + post) * cost
            return params, [own, *below], spent

        def correct(level, v, params, opt_states, known):
            """Add the change of the parameters of the level below."""
            value, gradient = known
            start = move(restrict, level + 1, params)
            restricted = move(lambda g: factor * restrict(g), level + 1, gradient)
            own_value, own_gradient = at(level + 1, optax.tree.zeros_like(start), start)
            v_below = optax.tree.sub(own_gradient, restricted)
            known_below = own_value - optax.tree.vdot(v_below, start), restricted
            learnt, opt_states, spent = visit(level + 1, v_below, start, opt_states, known_below)
            spent = {"gradients": spent["gradients"] + factor ** -(level + 1)}
            direction = move(prolong, level, optax.tree.sub(learnt, start))
            if line_search is None:
                return optax.apply_updates(params, direction), opt_states, spent

            def value_at(params):
                return losses[level](params, batch) - optax.tree.vdot(v, params), None

            slope = jnp.minimum(optax.tree.vdot(gradient, direction), 0)  # uphill, any fall will do
            params, _, trials, stuck = line_search.along(direction, params, value, slope, value_at)
            spent["gradients"] += trials * TRIAL * factor**-level
            return params, opt_states, {**spent, "trials": trials, "stuck": stuck}

        zeros = optax.tree.zeros_like(params)
        known = at(0, zeros, params)
        params, opt_states, spent = visit(0, zeros, params, opt_states, known)
        spent["gradients"] += 1.0
        return params, opt_states, {"loss": known[0], **spent}

    return cycle


def network(layers, width, classes):
    rngs = nnx.Rngs(0)
    trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(width, rngs=rngs), layers, rngs=rngs)
    opening = nn.DenseOpening((2,), width, rngs=rngs)
    return nn.Classifier(opening, trunk, nn.DenseClosing((width,), classes, rngs=rngs))


def main(arguments=None):
    parser = argparse.ArgumentParser(description="MG/Opt against the optimizer alone.")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--levels", type=int, default=2)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument(
        "--sweeps", type=int, help="of Picard's iteration; one layer after another without it"
    )
    args = parser.parse_args(arguments)

    points = data.peaks(samples=250, seed=0)
    batch = points.train_x, points.train_y  # the same examples in every step
    solver = lp_jax.Serial() if args.sweeps is None else lp_jax.Picard(sweeps=args.sweeps)
    optimizer = optax.adam(args.learning_rate)

    models = levels_of(network(args.layers, args.width, points.classes), args.levels)
    pairs = [train.classification(model) for model in models]
    losses = [lambda p, batch, f=f: f(p, batch, solver, None)[0] for f, _ in pairs]
    like = [params for _, params in pairs]
    cycle = make_cycle(losses, like, optimizer)
    params, opt_states = like[0], [optimizer.init(each) for each in like]
    gradients = 0.0
    for _ in range(args.cycles):
        params, opt_states, metrics = cycle(params, opt_states, batch)
        gradients += float(metrics["gradients"])
    loss = float(losses[0](params, batch))
    print(f"MG/Opt: loss {loss:.4f} after {args.cycles} cycles, {gradients:.0f} gradients")

    step_fn = train.make_train_step(pairs[0][0], optimizer)
    state = train.init_state(like[0], optimizer)
    for _ in range(round(gradients)):
        state, _ = step_fn(state, batch, solver)
    alone = float(losses[0](state.params, batch))
    print(f"alone:  loss {alone:.4f} after {round(gradients)} steps")


if __name__ == "__main__":
    main()
