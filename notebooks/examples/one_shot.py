r"""One-shot training: states, gradients and parameters converge together. A script to read, to copy and to change.

    python notebooks/examples/one_shot.py --layers 64 --steps 60

A sweep evaluates all layers at once, each on what the layer before it gave in the last sweep. If every training step has the same
examples, one sweep forward and two back are enough, because they begin where those of the step before ended. The script trains
in this way and, to compare, exactly. It prints both losses and draws one_shot.png, the loss against the number of layers that
are evaluated one after another. L-BFGS chooses the direction of a step, and a line search its length.

docs/training.md says when this pays: with many devices, for full batches.
"""

import argparse

import matplotlib.pyplot as plt
import optax
from flax import nnx
from rich.progress import Progress

import lp_jax
from lp_jax import data, nn, planning, train


def network(layers, width, classes):
    rngs = nnx.Rngs(0)
    opening = nn.DenseOpening((2,), width, rngs=rngs)
    trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(width, rngs=rngs), layers, rngs=rngs)
    return nn.Classifier(opening, trunk, nn.DenseClosing((width,), classes, rngs=rngs))


def depths(rows, layers, solver, adjoint_solver):
    """Return the number of layers that were evaluated one after another, up to the end of each step."""
    gradient = planning.training_step(solver, adjoint_solver, layers).depth()
    # A trial of the line search is a forward solve with the adjoint's number of sweeps, and a last one.
    trial = layers if adjoint_solver.exact else adjoint_solver.iterations + 1
    total, found = 0.0, []
    for row in rows:
        total += gradient + row["trials"] * trial
        found.append(total)
    return found


def main():
    parser = argparse.ArgumentParser(description="One-shot training against exact training.")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    points = data.peaks(samples=1000, seed=0)
    batch = points.train_x, points.train_y
    loss_fn, params = train.classification(network(args.layers, args.width, points.classes))
    lbfgs = optax.chain(optax.scale_by_lbfgs(memory_size=20), optax.scale(-1.0))

    one, two = lp_jax.Picard(sweeps=1), lp_jax.Picard(sweeps=2)
    serial = lp_jax.Serial()
    search = train.Backtracking(solver=two)
    options = {"solver": one, "adjoint_solver": two, "line_search": search}
    step_fn = train.make_train_step(loss_fn, lbfgs, line_search=train.Backtracking())
    runs = {
        "exact": ((serial, serial), step_fn, train.init_state(params, lbfgs)),
        "one-shot": ((one, two), *train.one_shot(loss_fn, params, lbfgs, batch, **options)),
    }
    fig, ax = plt.subplots(figsize=(8, 5), layout="constrained")
    with Progress() as progress:
        for name, (solvers, step_fn, state) in runs.items():
            bar = progress.add_task(name, total=args.steps)
            log = train.Log(show=lambda row, bar=bar: progress.update(bar, completed=row["step"]))
            state, _ = train.fit(
                step_fn,
                state,
                lambda epoch: [batch],
                steps_per_epoch=1,
                epochs=args.steps,
                solver=solvers[0],
                adjoint_solver=solvers[1],
                log=log,
            )
            rows = log.of("train")
            depth = depths(rows, args.layers, *solvers)
            ax.semilogx(depth, [row["loss"] for row in rows], label=name)
            test = train.evaluate(loss_fn, state.params, [(points.test_x, points.test_y)])
            print(
                f"{name}: loss {rows[-1]['loss']:.3f}, test accuracy {test.accuracy:.1%}, "
                f"{depth[-1]:,.0f} layers one after another"
            )
    ax.set(xlabel="layers evaluated one after another (less is faster)", ylabel="training loss")
    ax.set_title(f"{args.steps} steps of L-BFGS, a network of {args.layers} layers")
    ax.grid(alpha=0.3)
    ax.legend()
    fig.savefig("one_shot.png")
    print("wrote one_shot.png")


if __name__ == "__main__":
    main()
