"""Train on the 1,797 handwritten digits of scikit-learn; a fifth is held out."""

from lp_jax import data
from lp_jax.cli._models import Conv, Dense
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Training, task_of

PROBLEM = Problem(
    load=lambda training: task_of(data.digits(seed=training.seed), training),
    models={"dense": Dense(width=64), "conv": Conv(width=8)},
    training=Training(epochs=30),
    examples=(
        ("lp-jax train digits", "layer-parallel, then serially to compare"),
        ("lp-jax train digits --model conv --layers 32 --epochs 10", "a convolutional network"),
        ("lp-jax train digits --solver MGRIT --solver.levels 3 --solver.cycle F", "multigrid, three levels"),
        ("lp-jax train digits --solver MGRIT --solver.coarse_step Rediscretize", "the field's standard coarse step"),
        ("lp-jax train digits --solver mymodule.MySolver", "a solver of your own, a subclass of lp_jax.Solver"),
        ("lp-jax train digits --solver.help MGRIT", "the options of a solver"),
        ("lp-jax train digits --devices 4", "the layers over four devices"),
        ("lp-jax train digits --mesh layers=2,data=2", "layers and examples over four devices"),
        ("mpirun -n 4 lp-jax train digits --mpi", "the layers over four MPI ranks"),
        ("lp-jax train digits --resume", "go on after an interruption"),
    ),
)
