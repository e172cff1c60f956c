"""Assumptions of lp_jax on the programs that JAX writes, one in each test.

A failure says in words which assumption broke, and what it would make wrong. `lp_jax._arrays._jaxpr` is the place to mend.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lp_jax._arrays import _jaxpr
from lp_jax._choice._footprint import footprint
from lp_jax._levels._layer import Linearised
from lp_jax._solvers import _coupling, _elementwise

X = jnp.linspace(0.1, 0.7, 6).reshape(2, 3)
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


def equations(f, *arguments):
    return jax.make_jaxpr(f)(*arguments).eqns


def only(f, *arguments):
    """The last equation of a function, which is its only one but for preparations."""
    return equations(f, *arguments)[-1]


def mesh(axis="devices", kind=AxisType.Auto):
    return jax.make_mesh((2,), (axis,), axis_types=(kind,))


def spread(f, axis="devices"):
    specs = {"in_specs": PartitionSpec(axis), "out_specs": PartitionSpec(axis)}
    return jax.jit(jax.shard_map(f, mesh=mesh(axis), **specs))


def body(carry, x):
    return jnp.tanh(carry @ W + x), jnp.sum(carry)


def loop(x):
    return lax.scan(body, x, jnp.ones((5, 2, 3)), reverse=True, unroll=2)


def until(x):
    limit = jnp.sum(x) + 10
    return lax.while_loop(lambda y: jnp.sum(y) < limit, lambda y: y + W[:2] ** 2, x)


def branch(x):
    return lax.switch(jnp.int32(x[0, 0] > 0), [jnp.sin, jnp.cos], x)


@jax.custom_jvp
def forward_rule(x):
    return jnp.sin(x)


forward_rule.defjvp(lambda primals, tangents: (forward_rule(*primals), 2 * tangents[0]))


@jax.custom_vjp
def backward_rule(x):
    return jnp.sin(x)


backward_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, bar: (jnp.cos(x) * bar,))

NESTED = {
    "jit": jax.jit(jnp.sin),
    "remat2": jax.checkpoint(jnp.sin),
    "cond": branch,
    "while": until,
    "shard_map": jax.shard_map(
        jnp.sin, mesh=mesh(), in_specs=PartitionSpec("devices"), out_specs=PartitionSpec("devices")
    ),
    "scan": loop,
}
RULES = {"custom_jvp_call": forward_rule, "custom_vjp_call": backward_rule}


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NESTED, *RULES])
def test_operations_that_hold_programs_have_these_names(name):
    found = only((NESTED | RULES)[name], X).primitive.name
    assert found == name, (
        f"JAX calls {found!r} what it called {name!r}: `parallel` would not find scans within it, and "
        "the analyses would take it for an operation that they do not know"
    )


def test_all_that_lp_jax_enters_is_named_here():
    assert {*NESTED, core.primitives.closed_call_p.name} == _jaxpr.NESTED, (
        "lp_jax enters an operation without a test of its name"
    )


@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_user_are_seen_by_a_prefix(name):
    equation = only(RULES[name], X)
    assert _jaxpr.has_rule(equation) and _jaxpr.has_rule(equation, name.split("_")[1]), (
        f"JAX calls a function with a rule {equation.primitive.name!r}, without the prefix 'custom_': "
        "rules that close over values of their trace would be used outside of it, and Newton would "
        "take a forward derivative that a custom_vjp does not have"
    )


BY_ITSELF = {
    "abs": jnp.abs,
    "add": lambda x: x + x,
    "clamp": lambda x: lax.clamp(0.0, x, 1.0),
    "convert_element_type": lambda x: x.astype(jnp.float32),
    "copy": jnp.copy,
    "cos": jnp.cos,
    "div": lambda x: x / (x + 1),
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "integer_pow": lambda x: x**3,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "logistic": lax.logistic,
    "lt": lambda x: x < x,
    "max": lambda x: lax.max(x, x),
    "mul": lambda x: x * x,
    "neg": lambda x: -x,
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "select_n": lambda x: lax.select(x > 0, x, x),
    "sin": jnp.sin,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "sub": lambda x: x - 1,
    "tanh": jnp.tanh,
}


def test_operations_on_single_numbers_have_these_names():
    found = {name: only(f, X).primitive.name for name, f in BY_ITSELF.items()}
    renamed = {name: other for name, other in found.items() if name != other}
    assert not renamed, (
        f"JAX renamed operations on single numbers, {renamed}: lp_jax would take steps with them for "
        "steps that combine numbers, and would solve them by slower ways"
    )
    known = {*_elementwise._BY_ITSELF, *_elementwise._SAME_ORDER, *_coupling._ONE_BY_ONE}
    assert known >= set(found)


def test_products_and_convolutions_have_these_names():
    kernel = jnp.ones((2, 2, 3, 5))
    image = jnp.ones((1, 4, 4, 3))
    numbers = ("NHWC", "HWIO", "NHWC")
    convolution = only(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers),
        image,
        kernel,
    )
    assert _jaxpr.is_product(only(jnp.matmul, X, W)), (
        "JAX renamed dot_general: costs of layers would be too low, and the default would choose badly"
    )
    assert convolution.primitive.name == "conv_general_dilated", (
        "JAX renamed convolutions: their costs would be too low, and the default would choose badly"
    )
    assert _jaxpr.axes_of(convolution).rhs_spec[0] == 3, (
        "the first number of rhs_spec is no longer the kernel's axis of output features: costs of "
        "convolutions would be wrong"
    )


def test_callbacks_and_kinds_of_keys_have_these_names():
    def calls(x):
        jax.debug.print("{}", x)
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def counted(f):
        return footprint(jax.make_jaxpr(f)(X).jaxpr, []).counted

    assert not counted(calls), "JAX renamed callbacks: a layer that calls one would count as free"
    assert counted(lambda x: jax.debug.print("{}", x)), (
        "JAX renamed the callback of jax.debug.print: a layer that prints would have no known cost"
    )
    draws = {
        kind: footprint(
            jax.make_jaxpr(jax.random.normal)(jax.random.key(0, impl=kind)).jaxpr, []
        ).alone
        for kind in ("rbg", "unsafe_rbg", "threefry2x32")
    }
    assert draws == {"rbg": True, "unsafe_rbg": True, "threefry2x32": False}, (
        "JAX renamed the kinds of keys: layers evaluated in a batch would draw other numbers"
    )


def test_what_only_moves_an_array_has_these_names():
    with jax.set_mesh(mesh("a", AxisType.Explicit)):
        place = PartitionSpec("a")
        found = {only(lambda x: jax.sharding.reshard(x, place), X).primitive.name}
    sharding = NamedSharding(mesh("b"), PartitionSpec("b"))
    found |= {only(lambda x: lax.with_sharding_constraint(x, sharding), X).primitive.name}
    assert found == {"reshard", "sharding_constraint"}, (
        f"JAX calls {found} what only moves an array: under vmap within a shard_map, a step that "
        "constrains its arrays would be refused"
    )


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "axes"),
    [
        (lambda x: lax.reduce_sum(x, (0,)), (0,)),
        (lambda x: lax.cumsum(x, 1), (1,)),
        (lambda x: lax.cummax(x, 0), (0,)),
        (lambda x: lax.rev(x, (1,)), (1,)),
        (lambda x: lax.transpose(x, (1, 0)), (1, 0)),
        (lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)), (1, 2)),
        (lambda x: lax.dot_general(x, W, (((1,), (0,)), ((), ()))), (((1,), (0,)), ((), ()))),
    ],
)
def test_axes_are_a_parameter_of_operations(f, axes):
    equation = only(f, X)
    assert _jaxpr.axes_of(equation) == axes, (
        f"JAX keeps the axes of {equation.primitive.name} in another way: lp_jax would take examples "
        "that a step combines for independent ones, and Newton's Jacobians would be wrong"
    )


def test_a_scan_has_constants_then_carries_then_arrays():
    for f, consts in ((loop, 1), (lambda x: jax.grad(lambda x: jnp.sum(loop(x)[0]))(x), None)):
        scan = [e for e in _jaxpr.walk(equations(f, X)) if _jaxpr.is_scan(e)][-1]
        parts = _jaxpr.scan_parts(scan)
        operands = [v.aval.shape for v in scan.invars]
        within = [v.aval.shape for v in parts.body.jaxpr.invars]
        end = parts.consts + parts.carries
        right = within == operands[:end] + [shape[1:] for shape in operands[end:]]
        right &= all(shape[0] == parts.length == 5 for shape in operands[end:])
        right &= consts in (None, parts.consts)
        assert right, (
            "JAX orders the operands of a scan otherwise, or wraps its body: `parallel` would hand "
            "parameters to the state and the state to the parameters"
        )
    parts = _jaxpr.scan_parts(only(loop, X))
    assert (parts.reverse, parts.unroll, parts.carries) == (True, 2, 1), (
        "JAX keeps reverse or unroll of a scan otherwise: `parallel` would run layers in another order"
    )


def test_a_loop_of_unknown_length_keeps_its_condition_apart():
    (inner,) = _jaxpr.inside(only(until, X))
    assert [v.aval.shape for v in inner.outvars] == [X.shape], (
        "JAX keeps the condition of a while loop under another name than cond_jaxpr: its operations "
        "would be taken for those of the body"
    )


def test_a_switch_has_an_index_and_then_the_operands_of_its_branches():
    equation = only(branch, X)
    arities = {(len(p.invars), len(p.outvars)) for p in _jaxpr.called(equation)}
    assert len(_jaxpr.called(equation)) == 2 and arities == {(len(equation.invars) - 1, 1)}, (
        "the first operand of a switch is no longer its index: what depends on a state would be "
        "followed into the wrong operand of its branches"
    )


def test_programs_within_reductions_are_not_called():
    def largest(x):
        return lax.reduce(x, -jnp.inf, lambda a, b: jnp.where(a > b, a, b), (0,))

    def scattered(x):
        return x.at[0].add(1.0)

    assert not [e for f in (largest, scattered) for e in equations(f, X) if _jaxpr.called(e)], (
        "a reduction or scatter looks like a call of its addition: costs and dependences of states "
        "would be those of two numbers"
    )


@pytest.mark.parametrize("name", ["jit", "remat2", "cond", "while", "shard_map"])
@pytest.mark.parametrize("inline", [True, False])
def test_programs_within_an_operation_can_be_replaced(name, inline):
    closed = jax.make_jaxpr(NESTED[name])(X)
    run = lambda program, *operands: _jaxpr.evaluate(program, operands, _jaxpr.bind)  # noqa: E731

    def operation(equation, operands):
        if equation.primitive.name == name:
            return _jaxpr.rerun(equation, operands, run, inline=inline)
        return _jaxpr.bind(equation, operands)

    (found,) = jax.jit(lambda x: _jaxpr.evaluate(closed, (x,), operation))(X)
    np.testing.assert_array_equal(
        found,
        jax.jit(NESTED[name])(X),
        err_msg=f"JAX writes the parameters of {name!r} otherwise: `parallel` would fail on a "
        "function with one, or compute something else",
    )


def test_exchanges_name_their_axes():
    def exchanges(x):
        names = "a", "b"
        # `lax.axis_index` knows an axis, and exchanges nothing over it.
        y = lax.psum(x, names[0]) + lax.axis_index("c").astype(x.dtype)
        return lax.ppermute(y, names[1], [(0, 1), (1, 0)])

    devices = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)

    def found(x):
        axes.append(_jaxpr.exchanged_over([jax.make_jaxpr(exchanges)(x).jaxpr]))
        return x

    axes = []
    place = PartitionSpec(("a", "b", "c"))
    jax.eval_shape(
        jax.shard_map(found, mesh=devices, in_specs=place, out_specs=place), jnp.ones((8, 1))
    )
    assert set(axes[0]) == {"a", "b"}, (
        "JAX keeps the axes of psum or ppermute under other names: within a shard_map over several "
        "axes, devices that exchange something would not do the same number of sweeps, and hang"
    )


# --- scopes and places ----------------------------------------------------------------------------------------------


def test_a_derivative_is_in_a_scope_jvp():
    plain, gradient = (
        [_jaxpr.in_gradient(e) for e in equations(f, X)]
        for f in (jnp.tanh, jax.grad(lambda x: jnp.sum(jnp.tanh(x))))
    )
    assert any(gradient) and not any(plain), (
        "JAX no longer names the scope of a derivative 'jvp(': `parallel` would take a function that "
        "takes a gradient for one that does not, and solve in it what cannot be differentiated again"
    )


def test_scopes_have_names():
    def scoped(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    assert "inner" in _jaxpr.scopes(only(scoped, X)), (
        "JAX keeps scopes elsewhere than in source_info.name_stack: `scans` would tell no names, and "
        "`parallel` would warn of the scans in its own solves"
    )


def test_an_operation_knows_its_place_in_the_source():
    said = _jaxpr.source(only(loop, X))
    assert "test_jaxpr.py:" in said and "(loop)" in said, (
        f"JAX keeps tracebacks in another way: a warning would name {said!r} instead of the scan's place"
    )


# --- types ----------------------------------------------------------------------------------------------------------


def test_types_say_over_which_axes_numbers_vary():
    found = []

    def one(x):
        found.append([_jaxpr.varying_axes(y) for y in (x, jax.eval_shape(jnp.sin, x), jnp.ones(2))])
        alike = _jaxpr.vary(jnp.ones(2), {"devices"})
        found.append([_jaxpr.varying_axes(alike)])
        return x

    spread(one)(X)
    assert found == [[{"devices"}, {"devices"}, set()], [{"devices"}]], (
        "JAX keeps the axes that numbers vary over elsewhere than in manual_axis_type.varying: a "
        "solve within a user's shard_map would sum gradients over too few devices"
    )
    assert _jaxpr.varying_axes(X) == _jaxpr.varying_axes(jax.typeof(X)) == set()


def test_marking_twice_is_marking_once():
    marked = jax.make_jaxpr(lambda x: _jaxpr.vary(x, {"devices"}))

    def one(x):
        closed = marked(jnp.ones(3))
        # The operation that marks gets what is marked already.
        return _jaxpr.evaluate(closed, (x[0],), _jaxpr.bind)[0][None]

    assert spread(one)(X).shape == X.shape, (
        "JAX renamed pvary, or its parameter axes: a solve within a user's shard_map would be refused"
    )


# --- evaluated, cut and followed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NESTED, *RULES, "key", "scope"])
def test_an_evaluated_program_is_the_program(name):
    def scope(x):
        with jax.named_scope("outer"):
            return jax.jit(jnp.sin)(x) * 2

    def key(x):
        return x + jax.random.normal(jax.random.key(1), x.shape)

    f = (NESTED | RULES | {"key": key, "scope": scope})[name]
    closed = jax.make_jaxpr(f)(X)
    again = jax.make_jaxpr(lambda x: _jaxpr.evaluate(closed, (x,), _jaxpr.bind))(X)
    before, after = (
        [(e.primitive.name, _jaxpr.scopes(e)) for e in _jaxpr.walk(p.eqns)] for p in (closed, again)
    )
    assert before == after, (
        f"JAX binds operations otherwise, such as {name!r}: steps would be compiled to other programs "
        "than the user's, or lose their scopes"
    )


@pytest.mark.parametrize("name", ["jit", "remat2", "custom_jvp_call"])
def test_calls_can_be_inlined(name):
    closed = jax.make_jaxpr((NESTED | RULES)[name])(X)
    inline = _jaxpr.through_calls(_jaxpr.bind, _jaxpr.INLINED)
    inlined = jax.make_jaxpr(lambda x: _jaxpr.evaluate(closed, (x,), inline))(X)
    assert [e.primitive.name for e in inlined.eqns] == ["sin"], (
        f"JAX keeps the program of {name!r} under another name than jaxpr or call_jaxpr: kernels and "
        "relays could not see the operations within it"
    )


def test_a_program_can_be_cut():
    def both(x):
        middle = jnp.sin(x)
        return middle, jnp.cos(middle)

    closed = jax.make_jaxpr(both)(X)
    first = closed.jaxpr.eqns[:1]
    (middle,) = first[0].outvars
    head = _jaxpr.part(closed, eqns=first, outvars=[middle])
    tail = _jaxpr.part(closed, invars=[middle], eqns=closed.eqns[1:], outvars=closed.jaxpr.outvars)
    (value,) = _jaxpr.evaluate(head, (X,), _jaxpr.bind)
    np.testing.assert_array_equal(
        _jaxpr.evaluate(tail, (value,), _jaxpr.bind)[1],
        jnp.cos(jnp.sin(X)),
        err_msg="Jaxpr.replace takes other arguments: relays could not transpose a step in two passes",
    )


def test_dead_operations_are_dropped():
    closed = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.exp(x))[0])(X)
    assert [e.primitive.name for e in _jaxpr.live(closed.jaxpr).eqns] == ["sin"], (
        "dce_jaxpr works otherwise: costs of layers would count what is never computed"
    )


def test_a_dependence_goes_through_loops_and_branches():
    def f(x, w):
        def turn(carry, w):
            a, b, n = carry
            return (a + 1, jnp.where(n > 0, a, b) + w, n + 1), lax.switch(
                n % 2, [jnp.sin, jnp.cos], b
            )

        (a, b, n), ys = lax.scan(turn, (x, x * 0, jnp.int32(0)), w)
        return a, b, n, ys, jax.jit(lambda n, y: (n, y))(n, b)

    program = jax.make_jaxpr(f)(X[0, 0], jnp.ones(4)).jaxpr
    assert _jaxpr.following(program, [True, False]) == [True, True, False, True, False, True], (
        "lp_jax no longer sees what depends on a state: arrays of a linearisation that depend on it "
        "would not be kept, and gradients would be taken at other states"
    )


def test_a_constant_that_is_traced_is_a_tracer():
    found = []

    @jax.jit
    def f(x):
        found.append(_jaxpr.closes_over_tracers(jax.make_jaxpr(lambda y: y * x)(X)))
        return x

    f(X)
    found.append(_jaxpr.closes_over_tracers(jax.make_jaxpr(lambda y: y * np.ones((2, 3)))(X)))
    assert found == [True, False], (
        "JAX keeps values that a function closes over elsewhere than in the program's consts: they "
        "would leak out of their trace"
    )


# --- derivatives ----------------------------------------------------------------------------------------------------


def two_layers(u, x, shared):
    hidden = jnp.tanh(u @ x) * jnp.cos(u)
    return jnp.sin(hidden) + shared * jax.jit(jnp.tanh)(hidden @ x), jnp.exp(u)


LINEARISED = Linearised(two_layers, (True,), weights=True, emits=(True,))
OPERANDS = X, W, jnp.float64(0.5)


def test_two_traces_of_a_pullback_have_the_same_operations():
    cotangents = X, [2 * X]
    solve, again, gradient = (
        jax.make_jaxpr(LINEARISED._linearise)(*operands)
        for operands in (OPERANDS, OPERANDS, (*OPERANDS, *cotangents))
    )
    assert str(solve) == str(again), "JAX writes a pullback in another order in every trace"
    beginning = [str(e.primitive) for e in gradient.eqns[: len(solve.eqns)]]
    assert beginning == [str(e.primitive) for e in solve.eqns], (
        "JAX drops or moves operations of a pullback that is called: a gradient would not find the "
        "arrays that its solve kept, and say so"
    )


class Reordered(Linearised):
    """A step of which JAX gives the arrays of the pullback in the reverse order."""

    def _linearise(self, *operands):
        leaves, out = super()._linearise(*operands)
        return leaves[::-1], out


def test_the_order_of_the_arrays_of_a_pullback_does_not_matter():
    _, kept = LINEARISED.evaluate(*OPERANDS)
    wanted = jax.vjp(lambda *operands: two_layers(*operands), *OPERANDS)[1]
    sources = 2 * X
    other = Reordered(two_layers, (True,), weights=True, emits=(True,))
    for linearised in (LINEARISED, other):
        u, (x,), (shared,) = linearised.transpose(*OPERANDS, kept, X, [sources])
        for a, b in zip((u, x, shared), wanted((X, sources)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13)  # the compiler's order of sums
    # The kept arrays are used, and nothing that depends on the state is computed again.
    moved = X + 1, *OPERANDS[1:]
    np.testing.assert_allclose(
        LINEARISED.transpose(*moved, kept, X, [0 * X])[0], wanted((X, 0 * X))[0], rtol=1e-13
    )


def test_a_gradient_with_other_operations_than_its_solve_is_refused():
    _, kept = LINEARISED.evaluate(*OPERANDS)
    other = Linearised(lambda u, x, shared: (jnp.sinh(u @ x), jnp.exp(u)), (True,), emits=(True,))
    with pytest.raises(
        RuntimeError, match=r"other operations than the step in the solve.*its arguments"
    ):
        other.transpose(*OPERANDS, kept, X, [X])


def test_a_step_without_a_forward_derivative_counts_as_coupled():
    def called(u, *_):
        return jax.pure_callback(lambda u: u, jax.ShapeDtypeStruct(u.shape, u.dtype), u)

    def unknown(u, *_):
        return u.at[jnp.arange(2)].apply(jnp.sin)

    @jax.custom_jvp
    def wrong(u):
        return u

    wrong.defjvp(lambda primals, tangents: (primals[0], tangents[0][0]))
    for step in (called, unknown, lambda u, *_: wrong(u), lambda u, *_: backward_rule(u)):
        assert _coupling.couplings(step, X, None, None) == (0, 0), (
            "JAX raises another error for a step without a derivative in forward mode: the default "
            "would fail on a step that it could solve"
        )
    assert _coupling.couplings(lambda u, *_: jnp.tanh(u), X, None, None) == (2, 1)
