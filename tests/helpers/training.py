"""A small training that several processes begin, and one process goes on with."""

import jax
import numpy as np
import optax
from networks import dense_classifier

import lp_jax
from lp_jax import train


def run(folder, *, epochs, comm=None, everywhere=lambda x: x, share=lambda x: x, agree=None):
    """Train for ``epochs`` of two steps, from the newest checkpoint in the folder; the state and the losses of this call.

    ``everywhere`` puts what all devices hold on them, ``share`` the examples of a batch.
    """

    def batches(epoch):
        for step in range(2):
            rng = np.random.default_rng([epoch, step])
            yield share((rng.normal(size=(8, 3)), rng.integers(2, size=8)))

    loss_fn, params = train.classification(dense_classifier(8, comm=comm))
    optimizer = optax.adam(1e-2)
    state = everywhere(train.init_state(params, optimizer))
    with (
        jax.numpy_dtype_promotion("standard"),
        train.Checkpoints(folder, config={"layers": 8}) as checkpoints,
    ):
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
        state, log = train.fit(
            train.make_train_step(loss_fn, optimizer),
            state,
            batches,
            steps_per_epoch=2,
            epochs=epochs,
            solver=lp_jax.Serial(),
            checkpoints=checkpoints,
            agree=agree,
        )
    return state, [row["loss"] for row in log.of("train")]
