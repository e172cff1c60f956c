"""The network that the commands train and plan: it reads scikit-learn's handwritten digits."""

from flax import nnx

from lp_jax import MeshComm, Serial, Solver, nn

EXACT = Serial(), Serial()
WIDTH = 8


def network(
    layers: int,
    seed: int = 0,
    solvers: tuple[Solver, Solver] = EXACT,
    comm: MeshComm | None = None,
    *,
    width: int = WIDTH,
    t1: float = 1.0,
) -> nn.Classifier:
    """Return the network: dense residual layers of ``width`` units between two dense ones, for images of 8 x 8 pixels."""
    rngs = nnx.Rngs(seed)
    opening = nn.DenseOpening((8, 8, 1), width, rngs=rngs)
    trunk = nn.LayerParallel(
        lambda rngs: nn.DenseResidual(width, rngs=rngs),
        layers,
        t1=t1,
        rngs=rngs,
        solver=solvers[0],
        adjoint_solver=solvers[1],
        comm=comm,
    )
    return nn.Classifier(opening, trunk, nn.DenseClosing((width,), 10, rngs=rngs))
