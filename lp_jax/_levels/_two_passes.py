"""The transpose of a step in two passes: the cotangent that the step before waits for, and later the gradients.

A pass backwards through the layers of several devices has to wait for cotangents only. Gradients of weights follow on all devices
at once, as in zero-bubble pipelines (Qi, Wan, Huang, Lin, arXiv 2401.10241). The second pass computes nothing again that depends
on cotangents: such values are passed to it, of each product the cotangent that enters it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from lp_jax._arrays._jaxpr import CALLS, bind, dependents, evaluate, part, through_calls, variables
from lp_jax._arrays._place import in_its_types, nowhere
from lp_jax._arrays._types import PyTree


@dataclasses.dataclass(frozen=True)
class TwoPasses:
    """A function ``(lam, sources, operands) -> (lam, gradients)`` in two parts, by `in_two_passes`. All results are leaves.

    Attributes:
        late: of each gradient, whether the second pass computes it. Others need the same operations as the cotangents.
    """

    first: core.ClosedJaxpr
    second: core.ClosedJaxpr
    cotangents: int
    late: tuple[bool, ...]

    def back(
        self, cotangents: PyTree, operands: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Return the cotangents, the gradients that are not late, and what is passed to `gradients`."""
        out = in_its_types(self.first, jax.tree.leaves((cotangents, operands)), bind)
        n, early = self.cotangents, self.cotangents + self.late.count(False)
        return out[:n], out[n:early], out[early:]

    def gradients(self, given: PyTree, operands: PyTree) -> list[jax.Array]:
        """Return the late gradients. ``given`` has the values that `back` passed on, and the sources."""
        return in_its_types(self.second, jax.tree.leaves((given, operands)), bind)


def in_two_passes(
    transpose: Callable[..., tuple[PyTree, PyTree]], lam: PyTree, sources: PyTree, operands: PyTree
) -> TwoPasses:
    """Cut a transposed step, ``transpose(lam, sources, operands)``, from the shapes of its arguments."""
    # Calls are inlined, so that their operations can go to either pass.
    inline = through_calls(bind, CALLS)
    arguments = jax.tree.map(lambda x: x.update(sharding=nowhere(x)), (lam, sources, operands))
    calls = jax.make_jaxpr(transpose)(*arguments)
    whole = jax.make_jaxpr(lambda *x: evaluate(calls, x, inline))(*jax.tree.leaves(arguments))
    jaxpr, count = whole.jaxpr, len(jax.tree.leaves(lam))
    entering, gradients = jaxpr.invars[:count], jaxpr.outvars[count:]
    # `follows` are the values that depend on the cotangent of the state; `waited_for` those of them that its result needs.
    follows = dependents(jaxpr.eqns, entering)
    waited_for = [e for e in _needed(jaxpr.eqns, jaxpr.outvars[:count]) if _in(follows, e.outvars)]
    made = {*entering, *(v for eqn in waited_for for v in eqn.outvars)}
    # what is made of one value of the first pass is made there, too: it would be passed on in its place
    near = set(made)
    for eqn in jaxpr.eqns:
        if len(variables(eqn.invars)) == 1 and _in(near, eqn.invars):
            near.update(eqn.outvars)
    late = tuple(not _in(near, [v]) for v in gradients)
    rest = [eqn for eqn in jaxpr.eqns if not _in(made, eqn.outvars)]
    outs = [v for v in gradients if not _in(near, [v])]
    second = _needed(rest, outs)
    read = dict.fromkeys(v for eqn in second for v in variables(eqn.invars))
    # Values of the first pass that the second one reads.
    passed = [v for v in read if v in made]
    early = [v for v in gradients if _in(near, [v])]
    results = [*jaxpr.outvars[:count], *early, *passed]
    return TwoPasses(
        part(whole, eqns=_needed(jaxpr.eqns, results), outvars=results),
        part(whole, invars=[*passed, *jaxpr.invars[count:]], eqns=second, outvars=outs),
        count,
        late,
    )


def _needed(eqns: Sequence[core.JaxprEqn], results: Sequence[Any]) -> list[core.JaxprEqn]:
    """The operations that the results need."""
    wanted, needed = set(variables(results)), []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            needed.append(eqn)
            wanted.update(variables(eqn.invars))
    return needed[::-1]


def _in(some: set[core.Var], values: Sequence[Any]) -> bool:
    return not some.isdisjoint(variables(values))
