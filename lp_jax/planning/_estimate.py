"""From shapes and a device's data sheet, with nothing run: the times of a network's layers, and the default solvers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from lp_jax._arrays import _tree
from lp_jax._choice._fastest import Fastest
from lp_jax._choice._processor import OF_A_SUM, Processor, named
from lp_jax._problem import Problem
from lp_jax._programs._asked import asked
from lp_jax._programs._traced import Tracing, trace
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import Found, arrays, examples_of, small

# passes over the states in a sweep's sum of them; the number fits times measured on CPUs and traffic counted for an H200
_PASSES = 4


def _of_shapes(look: Callable[[Problem], Found], problem: Problem) -> Found:
    """Return what ``look`` says of a problem with traced arrays."""
    # The trace only shows shapes: what `look` finds is kept aside, and the traced function returns nothing.
    found = []
    jax.eval_shape(lambda arrays: found.append(look(problem.replace(**arrays))), arrays(problem))
    return found[0]


def estimate(problem: Problem, *, device: str | None = None) -> Machine:
    """Estimate a `Machine` from the operations of a layer's program, to a factor of a few; `calibrate` measures it.

    Only shapes matter: the problem's arrays may be traced, or be `jax.ShapeDtypeStruct`. ``device`` is a kind with a data sheet,
    such as "cpu", "H100" or "v5e", or what `jax.Device.device_kind` says of one; None means the device at hand. Messages take no
    time. On a CPU only ratios mean anything.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jnp.zeros((64, 32, 32)), jnp.zeros((8, 32)))
        >>> machine = planning.estimate(problem, device="H100")
        >>> machine.seconds("forward", 64) < 4 * machine.seconds("forward", 1)
        True
    """

    def look(problem: Problem) -> Machine:
        program, operands = trace(problem, (Serial(),))
        known = program.workers.processor if device is None else named(device)
        layer = program.traced.footprint
        layers = program.workers.layers
        y = operands.y0
        first = _tree.entry_like(operands.slices)
        # The second result is what the linearised step keeps for its transpose; only its shapes are needed.
        kept = jax.eval_shape(
            program.chain(*operands[:3]).linearised.evaluate, y, first, operands.shared
        )[1]
        most = known.at_once(layer, layers)
        # A batch that fills the device, an eighth and a 64th of it show where its time stops being constant.
        sizes = sorted({max(2, most // part) for part in (64, 8, 1)}) if most > 1 else []
        batches = [known.batch(layer, size) for size in sizes]
        summed = _PASSES * _tree.nbytes(y) / known.bandwidth
        sweeps = [seconds + size * summed for size, seconds in zip(sizes, batches, strict=True)]
        forward, backward = (seconds / layers for seconds in known.serial(layer, layers))
        examples = examples_of(y)
        newton = None
        # An iteration evaluates all layers, and solves the chain of their Jacobians.
        if small(y):
            numbers = sum(x.size for x in jax.tree.leaves(y)) // examples
            evaluations = zip((1, *sizes), (forward, *batches), strict=True)
            newton = tuple(
                seconds + known.newton(size, examples, numbers) for size, seconds in evaluations
            )
        # The same layer without products and other numbers has only its fixed costs.
        fixed, whole = (
            known.launch * layer.kernels + known.one(of, steps=layers)
            for of in (layer._replace(flops=0.0, numbers=0.0), layer)
        )
        # A sweep adds up its increments, forward and adjoint; gradients of parameters are not summed along the chain.
        return Machine(
            at_once=(1, *sizes),
            forward=(forward, *sweeps),
            adjoint=(backward / 2, *sweeps),
            gradient=(backward / 2, *batches),
            newton=newton,
            relaxation=(batches[-1] - known.launch * OF_A_SUM) / sweeps[-1] if sizes else 1.0,
            examples=examples,
            overhead=fixed
            / whole,  # kernels start, and parameters are read, for any number of examples
            state_bytes=_tree.nbytes(y),
            kept_bytes=_tree.nbytes(kept),
            layer_bytes=_tree.nbytes(first.params),
        )

    return _of_shapes(look, problem)


class Default(NamedTuple):
    """Solvers, and predicted seconds of value and gradient."""

    solver: Solver
    adjoint_solver: Solver
    seconds: float


def default(problem: Problem, *, solver: Solver = Fastest()) -> Default:
    """Return the solvers that a `Fastest`, or ``solver=None``, stands for, from shapes only. Within `assume`, for another device.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jax.ShapeDtypeStruct((512, 64, 64), "float32"), jnp.zeros((32, 64), "float32"))
        >>> with planning.assume("H200"):
        ...     planning.default(problem).solver.sweeps
        32
    """
    if not solver.chooses:
        raise TypeError(f"planning.default tells what Fastest(...) chooses; got solver={solver!r}.")

    pair, seconds = _of_shapes(lambda given: Tracing(given, (solver, solver)).chosen, problem)
    return Default(*pair, seconds)


@contextlib.contextmanager
def assume(device: str | Processor) -> Iterator[None]:
    """Let the default choose for another device in solves that are traced in the ``with`` block.

    ``device`` is a kind with a data sheet, such as "H200" or "v5p", or what `jax.Device.device_kind` says of one. Others
    raise a ValueError with the list. `default` has an example.
    """
    known = named(device) if isinstance(device, str) else device
    with asked(asked.value._replace(processor=known)):
        yield
