"""What every MPI rank of a test runs: solves on this many ranks, against the same solve on one device.

Arguments: cases, each with its own argument after ``=``. One job runs several, as starting the ranks takes seconds;
and each case imports what it needs.
"""

import collections
import contextlib
import doctest
import functools
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import INJECT, dense_params, dense_state, dense_step

import conftest  # noqa: F401  (float64, strict promotion)
import lp_jax
from lp_jax.planning import _calibrate

COMM = lp_jax.MPIComm()
CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def mine(n, *solvers):
    return lp_jax.layer_slices(n, COMM.size, *solvers)[COMM.rank]


def cut(tree, run):
    """Rows of stacked arrays; numbers by NumPy, which compiles nothing."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: x[run] if is_key(x) else jnp.asarray(np.asarray(x)[run]), tree)


def same_everywhere(tree):
    """Bit for bit on every rank."""
    theirs = COMM.comm.allgather([np.asarray(x) for x in jax.tree.leaves(tree)])
    assert all(
        np.array_equal(a, b, equal_nan=True)
        for rank in theirs
        for a, b in zip(rank, theirs[0], strict=True)
    )


def close(got, wanted, rtol=1e-11, atol=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def on_one_device(compute, names=("",)):
    """Results by name, each computed by one of the ranks alone, for all of them.

    Who has to wait sleeps: MPI itself would keep a core busy with waiting.
    """
    found = {
        name: jax.tree.map(np.asarray, compute(name)) for name in names[COMM.rank :: COMM.size]
    }
    everyone = COMM.comm.Ibarrier()
    while not everyone.Test():
        time.sleep(0.01)
    return dict(collections.ChainMap(*COMM.comm.allgather(found)))


@case
def solvers(names):
    import test_battery as battery
    import test_mesh as mesh

    params, y0, shared, data = battery.operands()
    exact = on_one_device(mesh.on_one_device, names.split(","))
    for name, (y1, trajectory, (of_params, *of_all, of_data), stats) in exact.items():
        solver = mesh.SOLVERS[name]
        run = mine(battery.N, solver)
        comm = lp_jax.MPIComm(sequential="gather" if name == "3 levels" else "relay")
        got = mesh.everything(solver, comm, operands=(cut(params, run), y0, shared, cut(data, run)))
        stride = solver.resolve(battery.N).stride(battery.N)
        points = slice(-(-run.start // stride), -(-run.stop // stride))
        mesh.assert_same(
            got, (y1, cut(trajectory, points), (cut(of_params, run), *of_all, of_data[run]), stats)
        )
        same_everywhere((got[0], got[2][1:3], got[3]))


@case
def small(names):
    """More ranks than intervals, dtypes that MPI does not know, mixed leaves, closures, times, aux, no gradients lost.

    Complex numbers are compared with those of a communicator of one rank.
    """
    n = 3
    solver, adjoint = (
        lp_jax.MGRIT(coarsening=2, iterations=2, coarse_step=INJECT),
        lp_jax.Picard(sweeps=2),
    )
    run, tolerances = mine(n, solver, adjoint), {"mixed": 2e-2, "complex": 1e-12}

    @functools.partial(jax.jit, static_argnums=4)
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True)
    def gradient(params, y0, factor, t1, comm):
        def step(y, layer):
            scale = (layer.params * layer.dt.astype(jnp.float64) * factor).astype
            y = jax.tree.map(lambda u: u + scale(u.dtype) * (u * u) if u.size else u, y)
            return y, (layer.index, layer.t)

        solution = lp_jax.solve(
            step, params, y0, t1=t1, solver=solver, adjoint_solver=adjoint, has_aux=True, comm=comm
        )
        loss = sum(jnp.sum(jnp.abs(u).astype(jnp.float64)) for u in jax.tree.leaves(solution.y1))
        return loss, solution.aux

    def found(name, run, comm):
        value = np.asarray([[0.5, -0.25]])
        mixed = {
            "bfloat16": value.astype(jnp.bfloat16),
            "others": [value.astype(np.float16), value.astype(np.complex64), np.float32(0.25)],
            "none": None,
            "empty": np.zeros((0, 2)),
        }
        y0 = jax.tree.map(jnp.asarray, mixed if name == "mixed" else value.astype(complex))
        params = jnp.asarray(np.linspace(0.1, 0.5, n)[run])
        return gradient(params, y0, jnp.asarray(1.5), jnp.asarray(2.0), comm)

    names = tuple(names.split(","))
    alone = lp_jax.MPIComm(COMM.comm.Split(COMM.rank))
    wanted = on_one_device(
        lambda name: found(name, slice(None), alone if name == "complex" else None), names
    )
    for name, ((loss, (index, t)), (of_params, *of_all)) in wanted.items():
        (got, aux), gradients = found(name, run, COMM)
        np.testing.assert_allclose(got, loss, rtol=tolerances[name])
        np.testing.assert_array_equal(aux[0], index[run])
        np.testing.assert_array_equal(aux[1], t[run])
        for a, b in zip(
            jax.tree.leaves(gradients), jax.tree.leaves((of_params[run], *of_all)), strict=True
        ):
            assert a.dtype == b.dtype
            x, y = (np.asarray(x, complex) for x in (a, b))
            np.testing.assert_allclose(x, y, rtol=tolerances[name], atol=tolerances[name])
        same_everywhere([np.asarray(x, complex) for x in jax.tree.leaves(gradients[1:])])


@case
@jax.numpy_dtype_promotion("standard")  # optax's Adam
def one_shot(_=None):
    """Steps that begin where the one before ended; a checkpoint has the whole trajectories."""
    import optax

    from lp_jax import train

    n, solver = 12, lp_jax.MGRIT(coarsening=4, iterations=1, coarse_step=INJECT)
    params, y0 = dense_params(n, 4), dense_state(3, 4)
    ranks, run = train.Ranks.grid(), mine(n, solver)

    def begin(params, comm):
        lbfgs = optax.scale_by_lbfgs(3) if comm is None else train.scale_by_lbfgs(3, ranks=ranks)
        optimizer = optax.chain(lbfgs, optax.scale(-1.0))

        def loss_fn(params, batch, solver, adjoint_solver, restart=None):
            given = {} if restart is None else restart._asdict()
            options = {"solver": solver, "adjoint_solver": adjoint_solver, "comm": comm}
            solution = lp_jax.solve(dense_step, params["trunk"], batch, **options, **given)
            info = train.Info(
                jnp.int32(3), solution.stats, solution.result, trajectory=solution.trajectory
            )
            return jnp.mean(solution.y1**2), info

        options = {"line_search": train.Backtracking(), "ranks": None if comm is None else ranks}
        return train.one_shot(loss_fn, {"trunk": params}, optimizer, y0, solver=solver, **options)

    def two_steps(step_fn, state):
        for _ in range(2):
            state, _ = step_fn(state, y0, solver, None)
        return state

    step_fn, first = begin(cut(params, run), ranks.layers)
    state = two_steps(step_fn, first)
    folder, empty = (
        COMM.comm.bcast(tempfile.mkdtemp()),
        lambda tree: jax.tree.map(lambda x: jnp.zeros_like(x), tree),
    )
    with train.Checkpoints(folder, config={}, ranks=ranks) as checkpoints:
        checkpoints.save(state)
    whole = ranks.gather(state)
    if whole is not None:  # to one device and back
        with train.Checkpoints(folder, config={}) as on_one:
            restored = on_one.restore(empty(whole))
            on_one.save(restored._replace(step=restored.step + 1))
        close(restored, whole, 0, 0)
    COMM.comm.Barrier()
    with train.Checkpoints(folder, config={}, ranks=ranks) as checkpoints:
        again = checkpoints.restore(empty(state))
    assert int(again.step) == int(state.step) + 1
    again = again._replace(step=state.step)
    close(again, state, 0, 0)

    def alone(_):
        step_fn, state = begin(params, None)
        return two_steps(step_fn, two_steps(step_fn, state))

    wanted, whole = on_one_device(alone)[""], ranks.gather(two_steps(step_fn, again))
    if whole is not None:  # L-BFGS arranges what it remembers otherwise than optax
        close(whole._replace(opt_state=None), wanted._replace(opt_state=None), 1e-10)


@case
@jax.numpy_rank_promotion("allow")
def transforms(_=None):
    """Gradients are those of a scan under vmap, checkpoint and scan, whichever arrays are mapped; the last rank has no layers.

    What a rank holds must not decide whether a message is batched, taken out of a loop, dropped, or sent again.
    """
    n, rng = 8, np.random.default_rng(0)
    y, params, data = (
        jnp.asarray(0.4 * rng.normal(size=shape)) for shape in ((3,), (n, 3, 3), (n, 3))
    )
    serial, windows = lp_jax.Serial(), lp_jax.Windowed(windows=2, sweeps=5)
    sweeps = lp_jax.Picard(sweeps=n, rtol=1e-12, fallback=True)
    cycles = lp_jax.MGRIT(coarsening=2, iterations=4, coarse_step=INJECT)
    run = mine(n, windows, cycles)
    assert (run.stop > run.start) == (COMM.rank < 2)

    def body(y, x):
        return y + 0.3 * jnp.tanh(y @ x[0] + x[1]), jnp.sum(y**2)

    def scanned(_, y, params, data):
        return jax.lax.scan(body, y, (params, data))

    def solved(solver, y, params, data):
        step = lambda y, layer: body(y, (layer.params, layer.data))  # noqa: E731
        comm = lp_jax.MPIComm(sequential="gather") if solver is cycles else COMM
        options = {"solver": solver, "comm": comm, "has_aux": True}
        solution = lp_jax.solve(step, params, y, data=data, **options)
        return solution.y1, solution.aux

    def loss(f, y, params, data):
        both = lambda x: jnp.stack([x, -2 * x])  # noqa: E731
        _, aux = jax.vmap(lambda y: f(windows, y, params, data))(both(y))
        inputs = jax.vmap(lambda data: f(cycles, y, params, data)[0])(both(data))
        weights = jax.vmap(lambda params: f(sweeps, y, params, data)[0])(both(params))

        @jax.checkpoint
        def twice(y, params):
            y = jnp.sin(f(sweeps, y, params, data)[0])
            return jnp.sum(f(cycles, y, params, data)[0] ** 2)

        def add(total, data):
            one, other = (f(solver, y, params, data)[0] for solver in (serial, windows))
            return total + jnp.sum(one * other), None

        over = jax.lax.scan(add, 0.0, both(data))[0]
        return jnp.sum(aux) + jnp.sum(inputs**2) + jnp.sum(weights**3) + twice(y, params) + over

    gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    of_y, *of_layers = gradient(scanned, y, params, data)
    got = gradient(solved, y, cut(params, run), cut(data, run))
    close(got, (of_y, *cut(of_layers, run)), 1e-9)
    same_everywhere(got[0])


@case
def outputs():
    """A loss that looks at what every layer returns; each rank has the part of its own layers."""
    import test_outputs as test

    solver = test.EXACT["Newton"]
    run = mine(test.N, solver)

    def loss(params, y0, shared):
        solution = lp_jax.solve(
            test.step, params, y0, shared=shared, t1=2.0, solver=solver, has_aux=True, comm=COMM
        )
        off = jnp.sum((solution.aux["out"] - test.TARGET[run]) ** 2) / test.TARGET.size
        return jnp.sum(solution.y1**2) + off + 0.1 * jnp.sum(solution.aux["norm"])

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(cut(test.PARAMS, run), test.Y0, test.SHARED)
    wanted = on_one_device(lambda _: test.exact_gradient())[""]
    close(got, (cut(wanted[0], run), *wanted[1:]))
    same_everywhere(got[1:])


@case
def fastest(_=None):
    """What the default takes by its name, on accelerators: sweeps to a tolerance as without a name, or exact methods."""
    n, width = 1024, 8
    draw = np.random.default_rng(0).normal
    weights, y0 = draw(size=(1, width, width)) / 2, jnp.asarray(draw(size=(4, width)))
    weights = weights + 0.05 * draw(size=(n, width, width))
    run = mine(n, lp_jax.Fastest())

    def loss(weights, solver, comm):
        step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)  # noqa: E731
        return jnp.sum(lp_jax.solve(step, weights, y0, solver=solver, comm=comm).y1 ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    exact = on_one_device(lambda _: gradient(jnp.asarray(weights), lp_jax.Serial(), None))[""][run]

    def error(solver):
        with lp_jax.planning.assume("H200"):
            found = gradient(cut(weights, run), solver, COMM)
        return np.linalg.norm(found - exact) / np.linalg.norm(exact)

    assert error(None) == error(lp_jax.Fastest()) > 1e-5
    assert error(lp_jax.Fastest(rtol=1e-5)) < min(1e-4, 0.3 * error(None))
    assert error(lp_jax.Fastest(rtol=None)) < 1e-12


@case
@jax.numpy_dtype_promotion("standard")  # optax's Adam
@jax.numpy_rank_promotion("allow")
def depths(_=None):
    """Nested iteration has the losses and parameters of one device; an interrupted run goes on with them."""
    import optax
    from flax import nnx
    from networks import dense_classifier

    from lp_jax import nn, train
    from lp_jax.nn._refine import staying

    placing, solver = lp_jax.MGRIT(coarsening=2), lp_jax.Serial()
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3))), jnp.arange(9) % 2

    def network(layers, comm):
        return dense_classifier(layers, solver=placing, comm=comm)

    def nested(comm, batches, **options):
        schedule = [train.Depth(n, 2, solver) for n in (8, 16)]
        options = {"steps_per_epoch": 1, "checkpoint_every": 1, **options}
        _, state, log = train.nested(
            network(8, comm), optax.adam(1e-2), batches, schedule, **options
        )
        return state, [row["loss"] for row in log.of("train")]

    def interrupted(epoch):
        if epoch == 2:  # before the first step of the deeper network
            raise InterruptedError
        return [batch]

    ranks = train.Ranks.grid(trunk="trunk/layers")
    on_ranks = {"ranks": ranks, "folder": COMM.comm.bcast(tempfile.mkdtemp())}
    with pytest.raises(InterruptedError):
        nested(COMM, interrupted, **on_ranks)
    state, losses = nested(COMM, lambda epoch: [batch], **on_ranks)
    alone, losses_alone = on_one_device(lambda _: nested(None, lambda epoch: [batch]))[""]
    whole = ranks.gather(state)
    if whole is not None:
        np.testing.assert_allclose(losses, losses_alone[2:], rtol=1e-11)
        close(whole, alone, 1e-9)
    with pytest.raises(
        ValueError, match=r"cannot move between ranks, which hold \[4, 2\] of 6 .* \[6, 6\] of 12"
    ):
        staying(nnx.eval_shape(lambda: network(6, COMM)).trunk, 12)
    with pytest.raises(ValueError, match="each has only its run"):
        nn.refine(network(8, COMM).trunk, how="linear")


@case
@jax.numpy_dtype_promotion("standard")  # optax's Adam
def grid(copies):
    """Layers x data: three steps have the numbers of one device; states are gathered and scattered whole."""
    import optax

    from lp_jax import train

    ranks = train.Ranks.grid(data=int(copies))
    n, width, batch = 12, 5, 8
    solvers = [lp_jax.MGRIT(coarsening=4, iterations=k, coarse_step=INJECT) for k in (2, 1)]
    run = lp_jax.layer_slices(n, ranks.layers.size, *solvers)[ranks.layers.rank]
    rng = np.random.default_rng(0)
    params = {"trunk": dense_params(n, width), "closing": jnp.asarray(rng.normal(size=(width, 2)))}
    inputs, answers = (jnp.asarray(rng.normal(size=(batch, k))) for k in (width, 2))

    def loss_fn(comm, params, batch, solver, adjoint_solver):
        x, y = batch
        solution = lp_jax.solve(
            dense_step, params["trunk"], x, solver=solver, adjoint_solver=adjoint_solver, comm=comm
        )
        right = jnp.abs(solution.y1 @ params["closing"] - y)
        info = train.Info(
            jnp.int32(right.size), solution.stats, solution.result, jnp.sum(right < 1, dtype=jnp.int32),
            jnp.linalg.norm(solution.y1),
        )  # fmt: skip
        return jnp.mean(right**2), info

    def three_steps(loss_fn, params, batch, ranks):
        optimizer = optax.adam(0.01)
        state = train.init_state(params, optimizer)
        step_fn = train.make_train_step(loss_fn, optimizer, ranks=ranks)
        seen = []
        for _ in range(3):
            state, metrics = step_fn(state, batch, *solvers)
            seen.append(metrics)
        return state, seen

    def alone(_):
        return three_steps(functools.partial(loss_fn, None), params, (inputs, answers), None)

    wanted = on_one_device(alone)[""]
    here = {"trunk": cut(params["trunk"], run), "closing": params["closing"]}
    local = ranks.local_batch((inputs, answers))
    assert len(local[0]) == batch // int(copies)
    state, seen = three_steps(
        ranks.loss(functools.partial(loss_fn, ranks.layers)), here, local, ranks
    )
    close(seen, wanted[1], atol=0)
    whole = ranks.gather(state)
    assert (whole is None) == (COMM.rank > 0)
    if whole is not None:
        close(whole, wanted[0], 1e-10)
    again = ranks.scatter(whole, jax.tree.map(jnp.zeros_like, state))
    close(again, state, 0, 0)
    assert ranks.agree(None) is None
    assert ranks.agree(15 if COMM.rank == COMM.size - 1 else None) == 15
    assert ranks.once(lambda: COMM.rank) == 0
    with pytest.raises(KeyError, match="only here"):
        ranks.once(lambda: {}["only here"])
    with pytest.raises(ValueError, match=r"data=3; it must divide"):
        train.Ranks.grid(data=3)
    if int(copies) > 1:
        with pytest.raises(ValueError, match="a batch of 7 examples cannot be split evenly over 2"):
            ranks.local_batch(inputs[:7])


@case
def spline(_=None):
    """Every rank has all coefficients and makes the weights of its own layers; ranks without layers too.

    There the program of a gradient and another solve takes nothing but constants.
    """
    import test_spline
    from flax import nnx

    from lp_jax import nn

    solver = lp_jax.MGRIT(coarsening=2, iterations=1, coarse_step=INJECT)
    of = {"weights": nn.Spline(coefficients=3, degree=2), "num_layers": 4, "solver": solver}
    y = test_spline.normal((3, test_spline.WIDTH))

    @nnx.jit
    def compute(trunk, y):
        gradient = nnx.value_and_grad(lambda trunk, y: jnp.sum(trunk(y) ** 2), argnums=(0, 1))
        return gradient(trunk, y), nn.refine(trunk)(y)

    def found(comm):
        return jax.tree.map(np.asarray, compute(test_spline.make_trunk(comm=comm, **of), y))

    wanted, got = on_one_device(lambda _: found(None))[""], found(COMM)
    close(got, wanted)
    same_everywhere(got)
    ordinary = test_spline.make_trunk(comm=COMM)
    for call in (nn.refine, nn.unstack):
        with pytest.raises(
            ValueError, match=f"spread over {COMM.size} ranks|cannot move between ranks"
        ):
            call(ordinary)


@case
def modules(_=None):
    """Dropout, running statistics, masks, sequences: nothing depends on the number of ranks."""
    import architectures

    run = mine(architectures.LAYERS, architectures.SOLVER)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for name, (of_all, expected) in on_one_device(
            architectures.everything, ("batch norm", "gru")
        ).items():
            of_mine, common = architectures.everything(name, COMM)
            architectures.assert_same((of_mine, common), (cut(of_all, run), expected))
            same_everywhere(common)


def count(jaxpr, times=1, counts=None):
    """Calls of MPI in a program, by name and shape, times the trips of the loops around them."""
    counts = collections.Counter() if counts is None else counts
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.endswith("_mpi"):
            counts[eqn.primitive.name.removesuffix("_mpi"), eqn.invars[0].aval.str_short()] += times
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count(inner, times * trips, counts)
    return counts


@case
def messages(_=None):
    """As on a mesh: one state per relaxation, P - 1 for a relay, one all-reduce each of the norms and y1."""
    n, width, batch, cycles = 64, 8, 3, 5
    solver = lp_jax.MGRIT(levels=3, iterations=cycles, start="guess", coarse_step=INJECT)
    params = cut(dense_params(n, width), mine(n, solver))
    y0 = dense_state(batch, width)
    for sequential in ("relay", "gather"):
        comm = lp_jax.MPIComm(sequential=sequential)
        run = functools.partial(lp_jax.solve, dense_step, solver=solver, comm=comm)
        counts = count(jax.make_jaxpr(run)(params, y0).jaxpr)
        assert counts.pop(("allreduce", f"float64[{batch * width}]")) == 1
        # the norms of all cycles, and whether they rise
        assert counts.pop(("allreduce", f"float64[{cycles + 1}]")) == 1
        inner = (
            0 < COMM.rank < COMM.size - 1
        )  # passes the relay's state on by two calls: it waits, works and sends
        relayed = cycles * (2 if inner else 1) if sequential == "relay" else 0
        assert (
            counts.pop(("sendrecv", f"float64[{batch * width}]"))
            == cycles * (1 + 2 + 1) + 1 + relayed
        )
        # the right-hand side in every cycle, the parameters once
        assert sum(counts.values()) == (0 if sequential == "relay" else cycles + 1), counts
        assert {name for name, _ in counts} <= {"allgather"}


@case
def disagree(_=None):
    """Every rank says what the ranks disagree on."""
    step = lambda y, layer: y + layer.dt.astype(y.dtype) * layer.params.astype(y.dtype) * y  # noqa: E731
    own = {
        "params": jnp.ones(16)[mine(16, lp_jax.MGRIT(coarsening=2))],
        "y0": jnp.ones(3),
        "t1": 2.0,
    }
    own["solver"] = lp_jax.MGRIT(coarsening=2)
    others = {  # what one rank passes otherwise
        r"on the layers: params, data\[0\] is float64\[\] on rank 0 and float32\[\] on rank 1": (
            1, {"params": own["params"].astype(jnp.float32)}),
        r"what all layers share: y0, shared\[0\] is float64\[3\] on rank 0 and float64\[4\] on rank 1": (
            1, {"y0": jnp.ones(4)}),
        r"the ranks passed \[7, 8\] layers, 15 in all; .* multiples of 2, .*like \[8, 7\].*lp_jax.layer_slices\(15, 2,": (
            0, {"params": own["params"][1:]}),
        r"the ranks passed \[4, 8\] layers, 12 in all; wanted are 12, as even as can be": (
            0, {"params": own["params"][:4]}),
        "disagree on the solvers": (1, {"solver": lp_jax.MGRIT(coarsening=4)}),
        "disagree on the times: t1 is 2.0 on rank 0 and 3.0 on rank 1": (1, {"t1": 3.0}),
    }  # fmt: skip
    for message, (rank, other) in others.items():
        with pytest.raises((TypeError, ValueError), match=message):
            lp_jax.solve(step, **(own | (other if COMM.rank == rank else {})), comm=COMM)
    for missing in (1, 2):  # as even as 15 and 14 layers can be
        fewer = own | {"params": own["params"][: 8 - missing * COMM.rank]}
        with pytest.raises(
            ValueError, match=rf"passed \[8, {8 - missing}\] layers, .* in all; wanted are 16"
        ):
            lp_jax.solve(step, **fewer, comm=lp_jax.MPIComm(layers=16))


@case
def examples(_=None):
    """The examples in docstrings that start MPI; in the process of pytest they are skipped."""
    from lp_jax import train

    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for module in (lp_jax._comms._mpi, train._ranks):
            result = doctest.testmod(module)
            assert result.attempted and not result.failed


@case
def pipelines(_=None):
    """Microbatches one after another over ranks: operands that differ, and then fewer layers than ranks."""
    import test_pipeline as pipes

    from lp_jax._arrays import _tree

    f, axes, (common, own, x) = pipes.operands_that_differ()

    def two(params, own, x):
        common, few = params
        y, *out = f(common, own, x)
        last = lambda y, w: (pipes.block(y, w, common["b"]), None)  # noqa: E731
        return jax.lax.scan(last, y, few)[0], *out

    def here(tree):
        (common, few), own, x = tree
        run, last = mine(7, lp_jax.Serial()), mine(1, lp_jax.Serial())
        common = common | {k: common[k][run] for k in "wn"}
        own = own | {"layers": jax.tree.map(lambda leaf: leaf[:, run], own["layers"])}
        return (common, few[last]), own, x

    args = (common, pipes.W[:1]), own, x
    alone = on_one_device(lambda _: pipes.numbers(jax.vmap(two, axes), *args))[""]
    (_, (y, *out)), gradient = alone
    run = mine(7, lp_jax.Serial())
    wanted = (
        (y, *(x[:, run] for x in out)),
        _tree.partition(here(_tree.partition(args)[1](gradient)))[0],
    )
    for checkpoint in (False, True):
        piped = lp_jax.pipeline(two, COMM, in_axes=axes, checkpoint=checkpoint)
        (_, out), gradient = pipes.numbers(piped, *here(args))
        close((out, gradient), wanted)
        same_everywhere((out[0], gradient[-1]))
    with pytest.raises(
        ValueError, match=r"reverse=True needs all layers in one place.*Take that out"
    ):
        backwards = lambda w, x: jax.lax.scan(lambda y, w: (y * w, None), x, w, reverse=True)  # noqa: E731
        lp_jax.pipeline(backwards, COMM, in_axes=(None, 0))(
            jnp.ones(run.stop - run.start), jnp.ones(2)
        )


@case
def fail():
    """One rank raises in the middle of a step, within a compiled program."""

    def broken(t):
        if COMM.rank == 1 and t > 0.5:
            raise FloatingPointError("layer at t > 0.5 has had enough")
        return np.zeros((), t.dtype)

    def step(y, layer):
        return y + layer.dt * layer.params * y + jax.pure_callback(broken, layer.t, layer.t)

    solver = lp_jax.MGRIT(coarsening=2, at_once=1, coarse_step=INJECT)
    params = jnp.ones(16)[mine(16, solver)]
    print(lp_jax.solve(step, params, jnp.ones(()), solver=solver, comm=COMM).y1)


@case
def apart(how):
    """Rank 1 leaves before a solve, makes one gradient fewer than rank 0, fails meanwhile, or has other numbers."""
    comm = lp_jax.MPIComm(patience=3.0, check=True)  # of the communicator that COMM has, too
    if how == "leaves" and comm.rank == 1:
        sys.exit(0)
    step, solver = (
        lambda y, layer: y + layer.dt * layer.params * y,
        lp_jax.MGRIT(coarsening=2, coarse_step=INJECT),
    )
    gradient = jax.jit(
        jax.grad(lambda params, y0: lp_jax.solve(step, params, y0, solver=solver, comm=comm).y1)
    )
    params, y0 = jnp.ones(16)[mine(16, solver)], jnp.ones(())
    jax.block_until_ready(gradient(params, y0))  # equal numbers pass
    if how == "numbers":
        jax.block_until_ready(gradient(params, y0 + comm.rank))
    elif how == "fails" and comm.rank == 1:
        with contextlib.suppress(SystemExit):
            sys.exit(4)  # one that is caught ends nothing
        sys.exit(3)
    elif comm.rank == 0:
        jax.block_until_ready(gradient(params, y0))


@case
def wires(_=None):
    """Every rank measures as often as the others, or they wait for ever."""
    found = _calibrate.interconnect(COMM, sizes=(1 << 8, 1 << 16))
    assert 0 < found["latency"] < 1 and min(found.values()) > 0


def main():
    for argument in sys.argv[1:]:
        name, _, detail = argument.partition("=")
        CASES[name](*([detail] if detail else []))
        if COMM.rank == 0:
            print(f"passed on {COMM.size} ranks: {argument}", flush=True)


if __name__ == "__main__":
    main()
