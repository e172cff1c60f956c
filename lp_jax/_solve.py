"""`solve`, and `solve_vjp` with a pullback that also returns the stats of the adjoint solve."""

from collections.abc import Callable

from lp_jax._arrays import _check
from lp_jax._arrays._types import CPoints, PyTree, Stacked, State, Step, Times
from lp_jax._comms._comm import Comm
from lp_jax._problem import Gradients, Problem
from lp_jax._programs import _inputs
from lp_jax._solution import Solution
from lp_jax._solvers._solver import Solver, Stats


@_check.check_arguments
def solve(
    step: Step,
    params: Stacked,
    y0: State,
    *,
    shared: PyTree = None,
    data: Stacked = None,
    t0: Times = 0.0,
    t1: Times = 1.0,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    guess: str | CPoints = "constant",
    adjoint_guess: CPoints | None = None,
    comm: Comm | None = None,
    has_aux: bool = False,
) -> Solution:
    """Propagate ``y0`` through N layers, all at once; gradients are computed all at once, too.

    Solves ``u[n+1] = step(u[n], layer n)``, ``u[0] = y0`` and returns ``u[N]``. At convergence this is the state that
    ``lax.scan`` gives, and ``jax.grad`` of it is the gradient of the scan: the adjoint system
    ``lam[n] = (dPhi_n/du)^T lam[n+1]`` is solved by the same method with ``adjoint_solver``'s settings. Works under jit,
    vmap and grad. It is a pure function, without state between calls.

    Args:
        step: ``step(y, layer) -> y_next``, a pure function like the body of a ``lax.scan`` over layers. ``y`` is a pytree,
            ``y_next`` has its structure, shapes and dtypes; ``layer`` is a `Layer`. It may close over arrays, traced and
            differentiated ones too.
        params: parameters of the layers; leaves ``(N, ...)``. Differentiated.
        y0: the state entering layer 0, a pytree of floating-point or complex arrays. Differentiated.
        shared: operands of every layer, seen as ``layer.shared``, not stacked. Differentiated; gradients are summed over layers.
        data: per-layer inputs, dropout keys, masks; leaves ``(N, ...)``, seen as ``layer.data``. Floating-point leaves are
            differentiated.
        t0: time at which layer 0 starts, in units of your choice.
        t1: time at which the last layer ends; layer n spans ``[t0 + n h, t0 + (n+1) h]``, ``h = (t1 - t0) / N``. Or an
            array of N + 1 increasing times (then ``t0`` is not used). Differentiated where it is a JAX value.
        solver: `Picard`, `MGRIT`, `Newton` or `Serial`. None is for any network: the method that is predicted to be fastest by
            the cost of a layer on the device (`planning.default` says which), and serial propagation where nothing is faster.
            Sweeps go to a tolerance of 1e-3, of the adjoint to 1e-2, and may cost as much as serial propagation, which then
            decides.
        adjoint_solver: the same for the adjoint system; None means the settings of ``solver`` (and a single iteration of
            `Newton`, as that system is linear).
        guess: where the first iteration starts: "constant" (``y0`` at every point) or "zeros", unless it is a cascade
            of `MGRIT`; or a trajectory: states at the level-0 C-points after point 0, leaves ``(ceil(N / m), ...)``, for
            example ``Solution.trajectory`` of an earlier call. `MGRIT` then starts with a cycle.
        adjoint_guess: where the adjoint solve starts: a trajectory of its own, ``Gradients.adjoint_trajectory`` of an earlier
            `solve_vjp`; None is the solver's own start. There is no derivative with respect to a guess;
            ``jax.grad`` returns for this argument the trajectory at which the adjoint solve *ended*, the guess for the next
            call.
        comm: where the layers live: None is one device; `MeshComm` spreads them over an axis of a device mesh, `MPIComm` over
            MPI ranks; each rank passes its own layers (`layer_slices`).
        has_aux: whether ``step`` returns ``(y_next, aux)``.

    Returns:
        A `Solution`. Gradients flow through ``y1`` and ``aux``.

    Raises:
        ValueError: for lengths, times, guesses or settings that do not fit, at trace time.
        TypeError: for a step that changes its state's structure, shapes or dtypes, and for integer states.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> def step(y, layer):
        ...     w, b = layer.params
        ...     return y + layer.dt * jnp.tanh(y @ w + b)
        >>> params = (jnp.zeros((64, 8, 8)), jnp.ones((64, 8)))
        >>> loss = lambda params: jnp.sum(lp_jax.solve(step, params, jnp.zeros(8)).y1 ** 2)
        >>> value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        >>> round(float(value), 2)
        4.64

    References:
        Guenther, Ruthotto, Schroder, Cyr, Gauger, "Layer-parallel training of deep residual neural networks", SIAM J.
        Math. Data Sci. 2 (2020).
    """
    where = _inputs.comm(comm)
    problem = Problem(step, params, y0, shared=shared, data=data, t0=t0, t1=t1, comm=where, has_aux=has_aux)
    return problem.solve(solver=solver, adjoint_solver=adjoint_solver, guess=guess, adjoint_guess=adjoint_guess)


@_check.check_arguments
def solve_vjp(
    step: Step,
    params: Stacked,
    y0: State,
    *,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    guess: str | CPoints = "constant",
    adjoint_guess: CPoints | None = None,
    **problem: PyTree,
) -> tuple[Solution, Callable[..., tuple[Gradients, Stats]]]:
    """`solve`, and the pullback of ``y1`` and ``aux`` that also returns the adjoint solve's stats.

    Its arguments are those of `solve`.

    Returns:
        The solution, and ``pullback(y1_cotangent, aux_cotangent=None) -> (gradients, adjoint_stats)``, whose `Gradients`
        equal those of ``jax.grad`` through `solve`. ``aux_cotangent`` is a tree like ``aux``; None, as a whole or for
        a leaf, is zero. Values that ``step`` closes over get no gradient here.

    Raises:
        ValueError: as `solve`; and over a mesh inside ``jax.set_mesh`` with explicit axes.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solver = lp_jax.MGRIT(coarsening=2, iterations=3)
        >>> solution, pullback = lp_jax.solve_vjp(step, jnp.ones(8), jnp.ones(()), solver=solver)
        >>> gradients, adjoint_stats = pullback(jnp.ones(()))
        >>> adjoint_stats.residual_norms.shape
        (3,)
    """
    whole = Problem(step, params, y0, **problem)
    return whole.solve_vjp(solver=solver, adjoint_solver=adjoint_solver, guess=guess, adjoint_guess=adjoint_guess)
