"""Nested iteration: train a shallow network, then deeper ones, each from the parameters of the last one."""

import contextlib
import functools
import inspect
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lp_jax import nn, planning
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax.nn._refine import staying
from lp_jax.train._checkpoint import Checkpoints
from lp_jax.train._log import Log
from lp_jax.train._loop import Every, fit
from lp_jax.train._ranks import RankCheckpoints, Ranks
from lp_jax.train._step import init_state, make_train_step, map_slots, replicate_rest
from lp_jax.train._supervised import classification
from lp_jax.train._types import Batch, LossFn, StepFn, TrainState

Once: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls a function in one process, and returns its value in all."""


class Depth(NamedTuple):
    """A part of nested iteration, at one depth.

    Attributes:
        layers: number of layers; for a network of several blocks, that of the longest.
        epochs: number of epochs at this depth.
        solver: solver of the forward solves.
        adjoint_solver: solver of the adjoint solves; None means the settings of ``solver``.
        tolerance: smallest relative fall of the mean loss from one epoch to the next. After a smaller fall the next depth
            begins early. 0 takes all epochs.
    """

    layers: int
    epochs: int
    solver: Solver = Serial()
    adjoint_solver: Solver | None = None
    tolerance: float = 0.0


def nested(
    model: nn.Classifier,
    optimizer: optax.GradientTransformation,
    batches: Callable[[int], Iterable[Batch]],
    depths: Sequence[Depth],
    *,
    steps_per_epoch: int,
    how: str = "constant",
    loss: Callable[[nn.Classifier], tuple[LossFn, PyTree]] = classification,
    measures: Callable[[nn.Classifier], Sequence[Every]] | None = None,
    folder: str | os.PathLike[str] | None = None,
    config: Mapping[str, object] | None = None,
    log: Log | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> tuple[nn.Classifier, TrainState, Log]:
    """Train at each depth in turn; parameters and the optimizer's state go on to the next one.

    Early steps are cheap, as the network is shallow. They need not be exact: the weights of the shallow network approximate
    those of a deeper network over the same time. To see whether this pays, compare with a shorter training of the deep network,
    and with training only the shallow one (docs/training.md has examples).

    Args:
        model: the network at the first depth. It is not changed.
        optimizer: one optimizer for all depths. Its schedule counts the steps of all depths; ``optax.join_schedules`` gives each
            depth its own.
        batches: as for `fit`; epochs are counted over all depths.
        depths: the depths in order. Each number of layers divides the next.
        steps_per_epoch: as for `fit`.
        how: how layers are refined, as for `lp_jax.nn.refine`.
        loss: ``loss(model) -> (loss_fn, params)``.
        measures: ``measures(model)`` gives the measurements at one depth, as for `fit`.
        folder: folder for the checkpoints, with a subfolder for each depth. A run is resumed from the newest one.
        config: as for `Checkpoints`.
        log: as for `fit`. A row of kind "depth" marks the beginning of each depth: its ``layers``, and for a step the number of
            layer evaluations (``work``), and of those one after another (``depth``).
        ranks: the MPI ranks that hold the layers, if any: those of the trunk's ``comm``. Layers do not move between ranks, so
            ``how`` must be "constant" or "zeros". All ranks call this; the loss is that of `Ranks.loss`.
        **options: ``log_every``, ``checkpoint_every``, ``meter``, ``agree``, as for `fit`.

    Returns:
        The deepest network with its parameters, the training state, and the log.

    Raises:
        ValueError: if a number of layers does not divide the next, the first is not the model's, or layers would have to
            move between ranks.
        TypeError: if the network cannot be refined.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> rngs = nnx.Rngs(0)
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(4, rngs=rngs), 4, rngs=rngs)
        >>> model = nn.Classifier(nn.DenseOpening((2,), 4, rngs=rngs), trunk, nn.DenseClosing((4,), 2, rngs=rngs))
        >>> batch = jnp.eye(2), jnp.arange(2)
        >>> depths = [train.Depth(4, epochs=10), train.Depth(8, epochs=5)]
        >>> deep, state, log = train.nested(model, optax.adam(0.1), lambda epoch: [batch], depths, steps_per_epoch=1)
        >>> first, *_, last = log.of("train")
        >>> deep.trunk.num_layers, last["step"], last["loss"] < first["loss"]
        (8, 15, True)

    Reference:
        Cyr, Guenther, Schroder, "Multilevel initialization for layer-parallel deep neural network training",
        arXiv:1912.08974 (2019).
    """
    factors = _factors(model, depths)
    folders = [None if folder is None else Path(folder) / f"{depth.layers}-layers" for depth in depths]
    if log is None:  # rank 0 writes the file
        log = Log(Path(folder) / "metrics.jsonl") if folder is not None and (ranks is None or ranks.is_root) else Log()
    once: Once = (lambda f: f()) if ranks is None else ranks.once
    for factor in itertools.accumulate(factors[1:], operator.mul):
        on_trunk(model.trunk, functools.partial(_check_staying, factor=factor, how=how))
    reached = once(
        lambda: max((i for i, path in enumerate(folders) if path is not None and _has_checkpoint(path)), default=0)
    )
    state = replicate_rest(init_state(loss(model)[1], optimizer))
    for i, (depth, factor, path) in enumerate(zip(depths, factors, folders, strict=True)):
        if i > 0:
            model, state = deepen(model, state, optimizer, factor, how=how, loss=loss)
            state = replicate_rest(state)
        if i < reached:
            continue
        with contextlib.ExitStack() as stack:
            if path is not None:
                make: Any = Checkpoints if ranks is None else ranks.checkpoints
                checkpoints: Checkpoints | RankCheckpoints
                checkpoints = stack.enter_context(make(path, config={**(config or {}), "layers": depth.layers}))
                options = {**options, "checkpoints": checkpoints}
                if checkpoints.latest is None:
                    checkpoints.save(state)
                state = checkpoints.restore(state)
            arguments = {**options, "measures": () if measures is None else measures(model)}
            step_fn = make_train_step(loss(model)[0], optimizer, ranks=ranks)
            state = _train(step_fn, state, batches, depth, steps_per_epoch, log, once, arguments)
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
    loss: Callable[[nn.Classifier], tuple[LossFn, PyTree]] = classification,
) -> tuple[nn.Classifier, TrainState]:
    """Return a network with ``factor`` times as many layers, and a training state to continue with it.

    The optimizer's state of a layer goes to all layers that replace it. A layer that is ``1 / factor`` as long has a gradient
    smaller by this factor, so a mean of gradients is divided by ``factor`` and a mean of squares by its square. Two updates
    with gradients of different size show which state is which. An optimizer that holds several arrays for a parameter, like
    L-BFGS, begins anew.

    Args:
        model: the network; its own parameters are not used.
        state: the training state of this network.
        optimizer: the optimizer that made ``state.opt_state``.
        factor: number of layers that replace each layer.
        how: as for `lp_jax.nn.refine`. With "zeros" the time grows, and the mean gradient of new layers is zero.
        loss: as for `nested`.

    Raises:
        TypeError: if the network has no `lp_jax.nn.LayerParallel` to refine.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> rngs, optimizer = nnx.Rngs(0), optax.adam(0.1)
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(4, rngs=rngs), 4, rngs=rngs)
        >>> model = nn.Classifier(nn.DenseOpening((2,), 4, rngs=rngs), trunk, nn.DenseClosing((4,), 2, rngs=rngs))
        >>> state = train.init_state(train.classification(model)[1], optimizer)
        >>> deep, state = train.deepen(model, state, optimizer)
        >>> deep.trunk.num_layers, state.opt_state[0].mu["trunk"]["layers"]["inner"]["kernel"].shape
        (8, (8, 4, 4))
    """
    deeper = nnx.clone(model)
    nnx.update(deeper, state.params)
    deeper.trunk = on_trunk(deeper.trunk, lambda block: nn.refine(block, factor, how))
    _, params = loss(deeper)
    fresh = init_state(params, optimizer)
    alike: list[bool] = []
    map_slots(lambda slot, param: alike.append(slot.shape == param.shape), state.opt_state, state.params)
    if not all(alike):
        return deeper, fresh._replace(step=state.step)
    degrees = iter(_degrees(optimizer, state.params))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def prolong(slot: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        degree = next(degrees)
        if slot.shape == wanted.shape:
            return slot
        if how == "zeros":
            return nn.refine(slot, factor, "zeros" if degree == 1 else "constant")
        return nn.refine(slot, factor) / factor**degree

    return deeper, fresh._replace(step=state.step, opt_state=map_slots(prolong, state.opt_state, shapes))


def _degrees(optimizer: optax.GradientTransformation, params: PyTree) -> list[int]:
    """Return for each slot the power of the gradient that it grows with: 1 for a mean of gradients, 2 for one of squares."""
    zeros = optax.tree.zeros_like(params)
    small = 1e-3 / max(1.0, sum(x.size for x in jax.tree.leaves(params))) ** 0.5  # a norm that no optimizer clips

    @jax.jit  # one program instead of one for every operation and shape
    def updated(gradient: PyTree, zeros: PyTree) -> PyTree:
        return optimizer.update(gradient, optimizer.init(zeros), zeros)[1]

    def after(scale: float) -> list[float]:
        opt_state = updated(jax.tree.map(lambda x: jnp.full_like(x, scale * small), params), zeros)
        sizes: list[float] = []
        map_slots(lambda slot, _: sizes.append(float(np.abs(np.asarray(slot, np.float64)).sum())), opt_state, zeros)
        return sizes

    return [round(np.log2(two / one)) if one > 0 else 0 for one, two in zip(after(1.0), after(2.0), strict=True)]


def on_trunk(trunk: object, change: Callable[[nn.LayerParallel], nn.LayerParallel]) -> nn.LayerParallel | nn.Network:
    """Return a trunk with all its blocks of layers changed, except buffers."""
    if isinstance(trunk, nn.LayerParallel):
        _refuse_positions(trunk)
        return change(trunk)
    parts = list(getattr(trunk, "parts", ()))
    if not any(map(_can_be_refined, parts)):
        raise TypeError(
            f"the trunk must be a LayerParallel, or a Network with such blocks; got {type(trunk).__name__}. The time steps of a "
            "recurrent network share their weights, so there is nothing to refine: train it on shorter sequences first."
        )
    return nn.Network(*[on_trunk(part, change) if _can_be_refined(part) else part for part in parts])


def _refuse_positions(trunk: nn.LayerParallel) -> None:
    """Refuse layers that read their number, because another depth changes the number of a layer."""
    layer = type(trunk.layers)
    if "index" in inspect.signature(layer.__call__).parameters:
        raise TypeError(
            f"{layer.__name__} reads its number (the keyword index), and a network with more or fewer layers numbers them "
            "otherwise, so its layers would do something else. Let it read the time t, or train at one depth."
        )


def _can_be_refined(part: object) -> bool:
    return isinstance(part, nn.LayerParallel) and not getattr(part.solver, "exact", False)  # those are buffers


def _factors(model: nn.Classifier, depths: Sequence[Depth]) -> list[int]:
    """Return the factors by which the network grows before each depth."""
    if not depths:
        raise ValueError("depths must have a Depth at least; got none.")
    parts = list(getattr(model.trunk, "parts", [model.trunk]))
    blocks = [part.num_layers for part in parts if hasattr(part, "num_layers")]
    numbers = [max(blocks, default=depths[0].layers), *(depth.layers for depth in depths)]
    factors, rests = zip(*(divmod(deep, shallow) for shallow, deep in itertools.pairwise(numbers)), strict=True)
    if factors[0] != 1 or 1 in factors[1:] or any(rests):
        raise ValueError(
            f"depths must begin with the model's {numbers[0]} layers, and each be a larger multiple of the one before; got "
            f"{numbers[1:]}."
        )
    return list(factors)


def _check_staying(block: nn.LayerParallel, factor: int, how: str) -> nn.LayerParallel:
    return staying(block, factor * block.num_layers, how)


def _has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a complete checkpoint: one under its number."""
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


def _train(
    step_fn: StepFn,
    state: TrainState,
    batches: Callable[[int], Iterable[Batch]],
    depth: Depth,
    steps_per_epoch: int,
    log: Log,
    once: Once,
    options: Mapping[str, Any],
) -> TrainState:
    """Train at one depth, to its last epoch or until the loss settles; ``once`` calls in the process with the whole log."""
    log.rewind(int(state.step))
    begun = once(lambda: [row["step"] for row in log.of("depth") if row["layers"] == depth.layers])
    if not begun:
        begun = [int(state.step)]
        adjoint_solver = depth.solver.for_adjoint() if depth.adjoint_solver is None else depth.adjoint_solver
        counted = planning.training_step(depth.solver, adjoint_solver, depth.layers)
        log.write(kind="depth", step=begun[0], layers=depth.layers, work=counted.work(), depth=counted.depth())
    first, reached = begun[0] // steps_per_epoch, int(state.step) // steps_per_epoch
    last = first + depth.epochs
    for epochs in range(reached + 1, last + 1) if depth.tolerance else [last]:
        if depth.tolerance and once(lambda: _has_settled(log, first, depth.tolerance)):
            break
        state, _ = fit(
            step_fn,
            state,
            batches,
            steps_per_epoch=steps_per_epoch,
            epochs=epochs,
            solver=depth.solver,
            adjoint_solver=depth.adjoint_solver,
            log=log,
            **options,
        )
    return state


def _has_settled(log: Log, first: int, tolerance: float) -> bool:
    """Return whether the mean loss fell by less than the part ``tolerance`` in the last epoch."""
    rows = [row for row in log.of("train") if row["epoch"] >= first]
    epochs = itertools.groupby(rows, operator.itemgetter("epoch"))
    *_, last, newest = [np.inf, np.inf, *(np.mean([row["loss"] for row in each]) for _, each in epochs)]
    return bool(newest > (1 - tolerance) * last)
