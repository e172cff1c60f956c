r"""MG/Opt: training steps on a shallow network correct those of a deep one. A script to read, to copy and to change.

    python notebooks/examples/mgopt.py --layers 32 --cycles 40

trains by MG/Opt, and for the same work by the optimizer alone, and prints both losses. In our measurements MG/Opt saves nothing
(docs/benchmarks.md): the deep network alone was better. It is multigrid with the parameters as unknowns. A cycle takes ``pre``
steps of the optimizer on the deep network, hands its problem to a network with half of the layers, adds the change of that
network's parameters, and takes ``post`` steps. The coarse problem is to minimise

    f_H(theta_H) - v . theta_H,    v = grad f_H(R theta) - P^T grad f(theta),

so that its gradient at the start is that of the fine level, restricted. P repeats layers (`nn.refine`), R takes means of them
(`nn.coarsen`), so P^T = 2 R. A line search along P (theta_H - R theta) says how much of that change is taken.

Nash, "A multigrid approach to discretized optimization problems", Optimization Methods and Software 14 (2000); von Planta,
Kopanicakova, Krause, "Training of deep residual networks with stochastic MG/OPT", arXiv:2108.04052 (2021).
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, train

SOLVER = lp_jax.Serial()  # or one that has all layers at once, like lp_jax.Picard(sweeps=4)
SEARCH = train.Backtracking(trials=5)
TRIAL = 1 / 3  # of a gradient: a trial evaluates each layer once, and a gradient three times


def levels_of(model, levels=2):
    """Return the network and shallower ones, each with half of the layers of the one before."""
    models = [model]
    for _ in range(levels - 1):
        coarse = nnx.clone(models[-1])
        coarse.trunk = nn.coarsen(coarse.trunk, 2)
        models.append(coarse)
    return models


def make_cycle(losses, like, optimizer, *, pre=1, post=1, coarsest=2, line_search=SEARCH):
    """Return ``cycle(params, opt_states, batch) -> (params, opt_states, metrics)``, a V-cycle on one batch.

    ``losses`` are functions ``loss(params, batch)``, from fine to coarse, and ``like`` are parameters of each level. Without a
    line search the whole correction is taken. ``metrics["gradients"]`` counts gradients of the deep network, others by layers.
    """
    tree, last = optax.tree, len(losses) - 1
    work = sum((1 + pre + post) / 2**level for level in range(last)) + coarsest / 2**last

    def move(change, level, params):
        """Bring parameters to a level: those of layers change, and all others stay."""
        own = like[level]
        return jax.tree.map(lambda x, y: x if x.shape == y.shape else change(x), params, own)

    @jax.jit
    def cycle(params, opt_states, batch):
        searches = {}  # the line search of each level: its trials, and whether none of them was taken

        def objective(level, v, params):
            return losses[level](params, batch) - tree.vdot(v, params)

        at = jax.value_and_grad(objective, argnums=2)

        def steps(level, v, number, params, opt_state, known):
            """Take steps of the optimizer; the compiler leaves out a last gradient that nobody asks for."""
            for _ in range(number):
                updates, opt_state = optimizer.update(known[1], opt_state, params)
                params = optax.apply_updates(params, updates)
                known = at(level, v, params)
            return params, opt_state, known

        def visit(level, v, params, opt_states, known):
            """Improve a level's parameters, at which the objective is ``known``."""
            own, *below = opt_states
            if level == last:
                params, own, _ = steps(level, v, coarsest, params, own, known)
                return params, [own]
            params, own, (value, gradient) = steps(level, v, pre, params, own, known)
            # The coarse problem starts at the restricted parameters, with the restricted gradient.
            start = move(lambda x: nn.coarsen(x, 2), level + 1, params)
            restricted = move(lambda g: 2 * nn.coarsen(g, 2), level + 1, gradient)
            own_value, own_gradient = at(level + 1, tree.zeros_like(start), start)
            v_below = tree.sub(own_gradient, restricted)
            known = own_value - tree.vdot(v_below, start), restricted
            learnt, below = visit(level + 1, v_below, start, below, known)
            # The change of the coarse parameters is a direction for the fine ones.
            direction = move(lambda x: nn.refine(x, 2), level, tree.sub(learnt, start))
            if line_search is None:
                params = optax.apply_updates(params, direction)
            else:
                slope = jnp.minimum(tree.vdot(gradient, direction), 0)  # uphill, any fall will do
                found = line_search.along(
                    direction, params, value, slope, lambda p: (objective(level, v, p), None)
                )
                params, searches[level] = found[0], found[2:]
            params, own, _ = steps(level, v, post, params, own, at(level, v, params))
            return params, [own, *below]

        zeros = tree.zeros_like(params)
        known = at(0, zeros, params)
        params, opt_states = visit(0, zeros, params, opt_states, known)
        trials = sum(trials * TRIAL / 2**level for level, (trials, _) in searches.items())
        metrics = {"loss": known[0], "gradients": work + trials}
        if searches:
            metrics["trials"], metrics["stuck"] = searches[0]
        return params, opt_states, metrics

    return cycle


def main(arguments=None):
    parser = argparse.ArgumentParser(description="MG/Opt against the optimizer alone.")
    for name, value in {"layers": 32, "levels": 2, "width": 8, "cycles": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(arguments)

    points = data.peaks(samples=250, seed=0)
    batch = points.train_x, points.train_y  # the same examples in every step
    optimizer = optax.adam(1e-2)
    rngs, width = nnx.Rngs(0), args.width
    trunk = nn.LayerParallel(lambda r: nn.DenseResidual(width, rngs=r), args.layers, rngs=rngs)
    opening = nn.DenseOpening((2,), width, rngs=rngs)
    closing = nn.DenseClosing((width,), points.classes, rngs=rngs)
    models = levels_of(nn.Classifier(opening, trunk, closing), args.levels)
    pairs = [train.classification(model) for model in models]
    losses = [lambda p, batch, f=f: f(p, batch, SOLVER, None)[0] for f, _ in pairs]
    like = [params for _, params in pairs]

    def trained(levels, cycles, **options):
        """Return the loss after some cycles over the first levels, and their cost in gradients."""
        cycle = make_cycle(losses[:levels], like, optimizer, **options)
        params, opt_states = like[0], [optimizer.init(each) for each in like[:levels]]
        gradients = 0.0
        for _ in range(cycles):
            params, opt_states, metrics = cycle(params, opt_states, batch)
            gradients += float(metrics["gradients"])
        return float(losses[0](params, batch)), gradients

    loss, gradients = trained(args.levels, args.cycles)
    print(f"MG/Opt: loss {loss:.4f} after {args.cycles} cycles, {gradients:.0f} gradients")
    steps = round(gradients)
    loss, _ = trained(1, steps, coarsest=1)  # a cycle of a single level is a step of the optimizer
    print(f"alone:  loss {loss:.4f} after {steps} steps")


if __name__ == "__main__":
    main()
