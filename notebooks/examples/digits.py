r"""A deep dense network learns handwritten digits. A script to read, to copy and to change.

    python notebooks/examples/digits.py --layers 256 --epochs 10

trains with all layers at once, prints how exact the last gradient was, and draws digits.png. For data of your own change
`load`; for another network change `layer` and `init`. With SOLVERS = {} lp_jax chooses how to compute the layers. On a laptop it
takes one after another, because nothing is faster there for a network as wide as this one. (`lp-jax demo` trains a narrower one.)
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.ticker import PercentFormatter
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.metrics import ConfusionMatrixDisplay
from sklearn.model_selection import train_test_split

import lp_jax

# A sweep evaluates all layers at once, each on a guess of its input, and corrects the guesses. The sweeps end when the guesses
# fit the layers to a thousandth. Those for the gradient (the adjoint) may end at a hundredth.
SOLVERS = {
    "solver": lp_jax.Picard(sweeps=32, rtol=1e-3),
    "adjoint_solver": lp_jax.Picard(sweeps=32, rtol=1e-2),
}


def load():
    """Return training inputs (samples, numbers), test inputs, training classes 0, 1, 2, ..., and test classes."""
    x, y = load_digits(return_X_y=True)  # (samples, 64) and (samples,)
    x = (x / 16).astype(np.float32)  # 0 to 1; for other columns take sklearn.preprocessing.scale
    return train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)


def layer(y, at):
    """One layer; ``at.params`` are its own, and ``at.dt`` is the length of its time step."""
    weights, bias = at.params
    return y + at.dt * jnp.tanh(y @ weights + bias)


def init(key, inputs, width, layers, classes):
    """Return parameters; those of the layers are stacked along their first axis."""
    opening, trunk, closing = jax.random.split(key, 3)
    weights = jax.random.normal(trunk, (layers, width, width)) / width**0.5
    return {
        "opening": jax.random.normal(opening, (inputs, width)) / inputs**0.5,
        "layers": (weights, jnp.zeros((layers, width))),
        "closing": jax.random.normal(closing, (width, classes)) / width**0.5,
    }


def logits_of(params, x):
    y = jnp.tanh(x @ params["opening"])
    y = lp_jax.solve(layer, params["layers"], y, t1=2.0, **SOLVERS).y1
    return y @ params["closing"]


def loss(params, x, labels):
    logits = logits_of(params, x)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def draw(losses, accuracies, truth, answers):
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    left.semilogy(losses)
    left.set(title="Training loss", xlabel="training step")
    middle.plot(range(1, len(accuracies) + 1), accuracies, "o-")
    middle.set(title=f"Test accuracy, {accuracies[-1]:.1%} at the end", xlabel="epoch")
    middle.yaxis.set_major_formatter(PercentFormatter(1))
    ConfusionMatrixDisplay.from_predictions(truth, answers, ax=right, cmap="Blues", colorbar=False)
    right.set_title("Answers on the test set")
    return fig


def main():
    parser = argparse.ArgumentParser(description="Train a deep dense network on digits.")
    for name, value in {"layers": 256, "width": 32, "batch": 50, "epochs": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()

    train_x, test_x, train_y, test_y = load()
    args.batch = min(args.batch, len(train_y))
    params = init(jax.random.key(0), train_x.shape[1], args.width, args.layers, train_y.max() + 1)
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, x, labels):
        value, gradient = jax.value_and_grad(loss)(params, x, labels)
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state, value

    @jax.jit
    def answers_of(params, x):
        return jnp.argmax(logits_of(params, x), axis=1)

    random = np.random.default_rng(0)
    losses, accuracies = [], []
    for _ in track(range(args.epochs), description="training"):
        order = random.permutation(len(train_y))
        # The samples that are left over wait for the next epoch: a shorter batch would compile once more.
        for rows in order[: len(order) // args.batch * args.batch].reshape(-1, args.batch):
            params, state, value = update(params, state, train_x[rows], train_y[rows])
            losses.append(value)
        accuracies.append(np.mean(answers_of(params, test_x) == test_y))
    print(f"{len(losses)} steps, test accuracy {accuracies[-1]:.1%}")
    rows = order[: args.batch]
    print(lp_jax.gradient_error(loss)(params, train_x[rows], train_y[rows]))
    draw(np.array(losses), accuracies, test_y, answers_of(params, test_x)).savefig("digits.png")
    print("wrote digits.png")


if __name__ == "__main__":
    main()
