"""Classify shapes, ModelNet10 or the like, in voxels."""

from lp_jax.cli._models import Conv
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Training, task_of
from lp_jax.data import contrib

_COARSE = "--solver MGRIT --solver.relaxation FCF --spatial 3"

PROBLEM = Problem(
    load=lambda training, data: task_of(contrib.modelnet(data), training),
    models={"conv": Conv(width=4, stride=2)},
    training=Training(epochs=3, batch_size=16),
    sources={"data": "Folder of CLASS/train/*.off and CLASS/test/*.off, or of voxels_train.npz and voxels_test.npz."},
    examples=(
        ("lp-jax train modelnet --data ~/ModelNet10", "three-dimensional convolutions"),
        (f"lp-jax train modelnet --data ~/ModelNet10 {_COARSE}", "coarser in space on the coarse level"),
    ),
)
