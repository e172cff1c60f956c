"""Each kind of network over the devices of a mesh; over MPI ranks in test_mpi."""

import jax
import pytest
from architectures import NAMES, assert_same, everything
from networks import mesh

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_depends_on_the_number_of_devices(name):
    """Masks of dropout, running statistics, values, gradients."""
    with jax.numpy_rank_promotion("allow"):
        assert_same(everything(name, mesh()), everything(name))
