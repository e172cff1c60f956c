"""Nested iteration: train a shallow network, then deeper ones, each from the parameters of the last one."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from lp_jax import Serial, Solver, nn, planning
from lp_jax._arrays._types import PyTree, StrPath
from lp_jax.nn._refine import staying
from lp_jax.train._checkpoint import Checkpoints
from lp_jax.train._log import Log
from lp_jax.train._loop import Every, fit
from lp_jax.train._ranks import Ranks
from lp_jax.train._step import init_state, make_train_step, map_slots, replicate_rest
from lp_jax.train._supervised import classification, parts_of
from lp_jax.train._types import Batch, LossFn, TrainState

MakeLoss = Callable[[nn.Classifier], tuple[LossFn, PyTree]]
"""A loss of a network and its parameters, as `classification` returns them."""


class Depth(NamedTuple):
    """A part of nested iteration: ``epochs`` at one depth. In a network of several blocks, the longest has ``layers``."""

    layers: int
    epochs: int
    solver: Solver = Serial()
    adjoint_solver: Solver | None = None


def nested(
    model: nn.Classifier,
    optimizer: optax.GradientTransformation,
    batches: Callable[[int], Iterable[Batch]],
    depths: Sequence[Depth],
    *,
    steps_per_epoch: int,
    how: str = "constant",
    loss: MakeLoss = classification,
    measures: Callable[[nn.Classifier], Sequence[Every]] | None = None,
    folder: StrPath | None = None,
    config: Mapping[str, object] | None = None,
    skip_damaged: bool = False,
    log: Log | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> tuple[nn.Classifier, TrainState, Log]:
    """Train at each depth in turn; parameters and the optimizer's state go on to the next one.

    Early steps are cheap, as the network is shallow, and need not be exact: its weights approximate those of a deeper network
    over the same time. Compare with a shorter training of the deep network, and with training only the shallow one.

    Args:
        model: the network at the first depth. It is not changed.
        optimizer: one optimizer for all depths; its schedule counts the steps of all (`optax.join_schedules`).
        batches: as for `fit`; epochs are counted over all depths.
        depths: the depths in order. Each number of layers divides the next.
        steps_per_epoch: as for `fit`.
        how: as for `lp_jax.nn.refine`.
        loss: ``loss(model) -> (loss_fn, params)``.
        measures: ``measures(model)`` gives the measurements at one depth, as for `fit`.
        folder: folder for the checkpoints, with a subfolder for each depth. A run is resumed from the newest one.
        config: as for `Checkpoints`.
        skip_damaged: as for `Checkpoints`.
        log: as for `fit`. A row of kind "depth" marks where training at a depth begins, or goes on: its ``layers``, and for a
            step the number of layer evaluations (``work``), and of those one after another (``depth``).
        ranks: the MPI ranks that hold the trunk's layers. Layers do not move between ranks, so ``how`` must be "constant" or
            "zeros". All ranks call this; the loss is that of `Ranks.loss`.
        **options: ``log_every``, ``checkpoint_every``, ``agree``, as for `fit`.

    Returns:
        The deepest network with its parameters, the training state, and the log.

    Raises:
        ValueError: if the depths do not begin with the model's, one does not divide the next, or layers would change ranks.
        TypeError: if the network has no `lp_jax.nn.LayerParallel` to refine.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> rngs = nnx.Rngs(0)
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(4, rngs=rngs), 4, rngs=rngs)
        >>> model = nn.Classifier(nn.DenseOpening((2,), 4, rngs=rngs), trunk, nn.DenseClosing((4,), 2, rngs=rngs))
        >>> batch = jnp.eye(2), jnp.arange(2)
        >>> depths, optimizer = [train.Depth(4, epochs=10), train.Depth(8, epochs=5)], optax.adam(0.1)
        >>> deep, state, log = train.nested(model, optimizer, lambda epoch: [batch], depths, steps_per_epoch=1)
        >>> first, *_, last = log.of("train")
        >>> deep.trunk.num_layers, last["step"], last["loss"] < first["loss"]
        (8, 15, True)
        >>> deeper, state = train.deepen(deep, state, optimizer)  # to go on by hand
        >>> deeper.trunk.num_layers, state.opt_state[0].mu["trunk"]["layers"]["inner"]["kernel"].shape
        (16, (16, 4, 4))

    Reference:
        Cyr, Guenther, Schroder, "Multilevel initialization for layer-parallel deep neural network training",
        arXiv:1912.08974 (2019).
    """
    if not depths:
        raise ValueError("depths must have a Depth at least; got none.")
    blocks = [part.num_layers for part in parts_of(model) if hasattr(part, "num_layers")]
    numbers = [max(blocks, default=depths[0].layers), *(depth.layers for depth in depths)]
    factors, rests = zip(
        *(divmod(deep, shallow) for shallow, deep in itertools.pairwise(numbers)), strict=True
    )
    if factors[0] != 1 or 1 in factors[1:] or any(rests):
        raise ValueError(
            f"depths must begin with the model's {numbers[0]} layers, and each be a larger "
            f"multiple of the one before; got {numbers[1:]}."
        )
    folders = [
        None if folder is None else Path(folder) / f"{depth.layers}-layers" for depth in depths
    ]
    log = log or Log()

    # The trunk at every later depth is the first one, refined.
    def check(block: nn.LayerParallel) -> nn.LayerParallel:
        for depth in depths:
            staying(block, depth.layers // depths[0].layers * block.num_layers, how)
        return block

    if len(depths) > 1:
        on_trunk(model.trunk, check)  # refuses layers that would change ranks before any training

    def newest() -> int:
        begun = (
            i
            for i, path in enumerate(folders)
            if path and any(each.name.isdigit() for each in path.glob("*"))
        )
        return max(begun, default=0)  # a complete checkpoint is named by its number

    reached = newest() if ranks is None else ranks.once(newest)
    state = init_state(loss(model)[1], optimizer)
    last = 0
    for i, (depth, factor, path) in enumerate(zip(depths, factors, folders, strict=True)):
        last += depth.epochs
        if i > 0:
            model, state = deepen(model, state, optimizer, factor, how=how, loss=loss)
        # Depths that are finished are passed over; their refinements only give
        # the template of the newest checkpoint its shapes.
        if i < reached:
            continue
        state = replicate_rest(state)
        with contextlib.ExitStack() as stack:
            if path is not None:
                about = {**(config or {}), "layers": depth.layers}
                checkpoints = stack.enter_context(
                    Checkpoints(path, config=about, skip_damaged=skip_damaged, ranks=ranks)
                )
                options["checkpoints"] = checkpoints
                # The state at the beginning of a depth is saved, because its layers
                # cannot be made again without the depth before.
                if checkpoints.latest is None:
                    checkpoints.save(state)
                state = checkpoints.restore(state)
            adjoint = depth.adjoint_solver or depth.solver.for_adjoint()
            counted = planning.training_step(depth.solver, adjoint, depth.layers)
            log.write(
                kind="depth",
                step=int(state.step),
                layers=depth.layers,
                work=counted.work(),
                depth=counted.depth(),
            )
            state, _ = fit(
                make_train_step(loss(model)[0], optimizer, ranks=ranks),
                state,
                batches,
                steps_per_epoch=steps_per_epoch,
                epochs=last,
                solver=depth.solver,
                adjoint_solver=depth.adjoint_solver,
                measures=() if measures is None else measures(model),
                log=log,
                **options,
            )
    model = nnx.clone(model)
    nnx.update(model, state.params)
    return model, state, log


def deepen(
    model: nn.Classifier,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    factor: int = 2,
    *,
    how: str = "constant",
    loss: MakeLoss = classification,
) -> tuple[nn.Classifier, TrainState]:
    """Return a network with ``factor`` times as many layers, and a training state to continue with it.

    The parameters come from ``state``, which ``optimizer`` made. The optimizer's state of a layer goes to all layers that
    replace it. A layer that is ``1 / factor`` as long has a gradient smaller by this factor, so a mean of gradients is divided by
    ``factor`` and a mean of squares by its square. Two updates with gradients of different size show which state is which. An
    optimizer that holds several arrays for a parameter, like L-BFGS, begins anew. ``how`` is that of `lp_jax.nn.refine`: with
    "zeros" the time grows, and the mean gradient of new layers is zero. For ``loss``, errors and an example see `nested`.
    """
    deeper = nnx.clone(model)
    nnx.update(deeper, state.params)
    deeper.trunk = on_trunk(deeper.trunk, lambda block: nn.refine(block, factor, how))
    _, params = loss(deeper)
    fresh = init_state(params, optimizer)
    # A slot of another shape holds several vectors, as L-BFGS does, whose differences mean nothing at another depth.
    if any(slot.shape != param.shape for slot, param in _slots(state.opt_state, state.params)):
        return deeper, fresh._replace(step=state.step)
    degrees = iter(_degrees(optimizer, state.params))

    def prolong(slot: jax.Array, wanted: jax.Array) -> jax.Array:
        degree = next(degrees)
        if slot.shape == wanted.shape:
            return slot
        if how == "zeros":
            return nn.refine(slot, factor, "zeros" if degree == 1 else "constant")
        return nn.refine(slot, factor) / factor**degree

    opt_state = map_slots(prolong, state.opt_state, params)
    return deeper, fresh._replace(step=state.step, opt_state=opt_state)


def _slots(opt_state: PyTree, params: PyTree) -> list[tuple[jax.Array, PyTree]]:
    found = []
    map_slots(lambda *pair: found.append(pair), opt_state, params)
    return found


def _degrees(optimizer: optax.GradientTransformation, params: PyTree) -> list[int]:
    """Return for each slot the power of the gradient that it grows with: 1 for a mean of gradients, 2 for one of squares."""

    def full(value: float) -> PyTree:
        return jax.tree.map(lambda x: np.full(x.shape, value, x.dtype), params)

    zeros = full(0.0)
    # a norm that no optimizer clips
    small = 1e-3 / max(1.0, sum(x.size for x in jax.tree.leaves(params))) ** 0.5

    @jax.jit
    def update(gradient: PyTree, zeros: PyTree) -> PyTree:
        return optimizer.update(gradient, optimizer.init(zeros), zeros)[1]

    def after(scale: float) -> list[float]:
        slots = _slots(update(full(scale * small), zeros), zeros)
        return [float(np.abs(np.asarray(slot, np.float64)).sum()) for slot, _ in slots]

    return [
        # A slot that grows with the k-th power of the gradient is 2^k times as large for twice the gradient.
        round(np.log2(two / one)) if one > 0 else 0
        for one, two in zip(after(1.0), after(2.0), strict=True)
    ]


def on_trunk(
    trunk: object, change: Callable[[nn.LayerParallel], nn.LayerParallel]
) -> nn.LayerParallel | nn.Network:
    """Return a trunk with all its blocks of layers changed, except buffers; refuse layers that read their number."""
    if isinstance(trunk, nn.LayerParallel):
        layer = type(trunk.layers)
        if "index" in inspect.signature(layer.__call__).parameters:
            raise TypeError(
                f"{layer.__name__} reads its number (the keyword index), and at another depth "
                "layers have other numbers. Let it read the time t, or train at one depth."
            )
        return change(trunk)

    def is_block(part: object) -> bool:  # else it is a buffer
        return isinstance(part, nn.LayerParallel) and not getattr(part.solver, "exact", False)

    parts = list(getattr(trunk, "parts", ()))
    if not any(map(is_block, parts)):
        raise TypeError(
            "the trunk must be a LayerParallel, or a Network with such blocks; got "
            f"{type(trunk).__name__}. The time steps of a recurrent network share their weights, "
            "so there is nothing to refine: train it on shorter sequences first."
        )
    return nn.Network(*(on_trunk(part, change) if is_block(part) else part for part in parts))
