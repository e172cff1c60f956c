r"""Layers over MPI ranks, with checkpoints. A script to read, to copy and to change.

    mpirun -n 2 python notebooks/examples/ranks.py --folder runs/ranks --epochs 5

Each rank is a process with its own layers. All ranks call all functions. Ctrl-C, or SIGTERM at any rank, ends all ranks after
the same step and saves it. The same command then goes on from there, and reaches the numbers of a run without a break. So does
``python notebooks/examples/ranks.py`` on one rank, or on four. ``--copies 2`` on four ranks makes two copies of the network,
each of which takes half of every batch.

The folder gets the checkpoints, and rows.jsonl with a row for each step. A run that was killed repeats the steps after its last
checkpoint, so the last row of a step is the one that counts. docs/nodes.md says how to install MPI.
"""

import argparse
from pathlib import Path

import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, train


def network(layers, width, dataset, comm):
    rngs = nnx.Rngs(0)
    opening = nn.DenseOpening(dataset.shape, width, rngs=rngs)
    # The trunk makes the parameters of this rank's layers only.
    trunk = nn.LayerParallel(
        lambda rngs: nn.DenseResidual(width, rngs=rngs), layers, t1=2.0, comm=comm, rngs=rngs
    )
    return nn.Classifier(opening, trunk, nn.DenseClosing((width,), dataset.classes, rngs=rngs))


def main():
    parser = argparse.ArgumentParser(description="Train over MPI ranks, and go on where it ended.")
    parser.add_argument("--folder", type=Path, default=Path("runs", "ranks"))
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    ranks = train.Ranks.grid(data=args.copies, trunk="trunk/layers")
    dataset = data.digits(seed=0)
    loss_fn, params = train.classification(network(args.layers, args.width, dataset, ranks.layers))
    loss_fn = ranks.loss(loss_fn)  # the mean over a rank's examples becomes that over the batch
    optimizer = optax.adam(3e-3)
    state = train.init_state(params, optimizer)
    steps = len(dataset.train_y) // args.batch

    def batches(epoch):
        for batch in data.batches(dataset, args.batch, seed=0, epoch=epoch):
            yield ranks.local_batch(batch)

    def test(state, batch):
        x = dataset.test_x[:300], dataset.test_y[:300]  # so many can be shared by the copies
        return train.evaluate(loss_fn, state.params, [ranks.local_batch(x)])._asdict()

    args.folder.mkdir(parents=True, exist_ok=True)
    rows = args.folder / "rows.jsonl" if ranks.is_root else None

    def show(row):
        if not ranks.is_root:
            return
        if row["kind"] == "test":
            print(f"step {row['step']}: test accuracy {row['accuracy']:.1%}", flush=True)
        if row["kind"] == "warning":
            print(f"step {row['step']}: {row['message']}", flush=True)

    # A checkpoint of another network is refused.
    config = {"layers": args.layers, "width": args.width, "batch": args.batch}
    with train.Checkpoints(args.folder / "checkpoints", config=config, ranks=ranks) as checkpoints:
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
            if ranks.is_root:
                print(f"going on after step {int(state.step)}", flush=True)
        try:
            state, _ = train.fit(
                train.make_train_step(loss_fn, optimizer, ranks=ranks),
                state,
                batches,
                steps_per_epoch=steps,
                epochs=args.epochs,
                solver=lp_jax.MGRIT(coarsening=4, iterations=2),
                adjoint_solver=lp_jax.MGRIT(coarsening=4, iterations=1),
                measures=[train.Every("test", steps, test)],
                log=train.Log(rows, show=show),
                checkpoints=checkpoints,
                agree=ranks.agree,
            )
        except train.Interrupted as stopped:
            raise SystemExit(str(stopped) if ranks.is_root else 1) from None
    whole = ranks.gather(state)  # the layers of all ranks, on rank 0; None on the others
    if whole is not None:
        weights = whole.params["trunk"]["layers"]["inner"]["kernel"]
        print(f"{int(whole.step)} steps; {len(weights)} layers on {ranks.world.size} rank(s)")


if __name__ == "__main__":
    main()
