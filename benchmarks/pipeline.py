"""Suite 6: layer-parallelism beside what else two devices are used for: data parallelism, and a pipeline of microbatches.

All of them train the same network on the same batch, on two host devices of one process, one thread each; the baseline is
a scan on one of them. Data parallelism and the pipeline are written here, for comparison: they are no part of the library.
The pipeline is GPipe's (Huang et al., 2019): each device has half of the layers, microbatches follow each other, and
gradients are summed over them, so that the gradient is exact; activations are kept, not recomputed; its turns are a loop,
or unrolled. Memory is kept from step to step, as in suite ``ranks``. Bubble: the part of its time in which a device has
nothing to do. kB sent: by a device in a step.
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lp_jax
from benchmarks.command import Field, Row, Suite, network_row, run, wanted
from benchmarks.harness import Contender, Tell, relative_error
from benchmarks.networks import NETWORKS, SETTINGS, Network, Weights, counted_ratio, half_mean_square, through
from benchmarks.training import Trainer
from lp_jax import planning

WORKERS = 2
MICROBATCHES = (2, 4, 8)

Through = Callable[[Any, jax.Array], jax.Array]
"""Takes a state through layers with these parameters."""

Loss = Callable[[Weights, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Of weights, the state that enters and the target; with the last residual norm, or NaN."""


def data_parallel_loss(run: Through, mesh: Mesh) -> Loss:
    """Of a scan on every device, each with its part of the examples; gradients are summed once, at the end.

    Left to the partitioner, or to where values begin to differ between devices, there would be a sum for each layer.
    """

    def part(params: Any, y: jax.Array, target: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda x: lax.pcast(x, "layers", to="varying"), params)
        return half_mean_square(None, run(own, y), target)[None]

    examples = P("layers")
    spread = jax.shard_map(part, mesh=mesh, in_specs=(P(), examples, examples), out_specs=examples)

    def loss(weights: Weights, y: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.mean(spread(weights.layers, y, target)), jnp.full((), jnp.nan, y.dtype)

    return loss


def pipeline_loss(run: Through, mesh: Mesh, microbatches: int, *, looped: bool) -> Loss:
    """Of a pipeline: in each turn a device takes a microbatch through its layers and hands it on.

    A loop over the turns copies what each keeps for its gradient into a stack; without one the gradients of all turns are held
    before they are summed. Which costs more depends on the network.
    """
    devices = mesh.shape["layers"]
    turns = microbatches + devices - 1

    def part(params: Any, y: jax.Array, target: jax.Array) -> jax.Array:
        mine = lax.axis_index("layers")
        parts, wanted = (x.reshape(microbatches, -1, *x.shape[1:]) for x in (y, target))

        def turn(received: jax.Array, number: Any) -> tuple[jax.Array, jax.Array]:
            entering = parts[jnp.minimum(number, microbatches - 1)]
            out = run(params, jnp.where(mine == 0, entering, received))
            passed = lax.ppermute(out, "layers", [(i, i + 1) for i in range(devices - 1)])
            done = number - (devices - 1)
            error = 0.5 * jnp.sum((out - wanted[jnp.maximum(done, 0)]) ** 2) / y.size
            return passed, jnp.where((mine == devices - 1) & (done >= 0), error, 0)

        nothing = lax.pcast(jnp.zeros_like(parts[0]), "layers", to="varying")
        _, losses = lax.scan(turn, nothing, jnp.arange(turns), unroll=1 if looped else turns)
        return jnp.sum(losses)[None]

    spread = jax.shard_map(part, mesh=mesh, in_specs=(P("layers"), P(), P()), out_specs=P("layers"))

    def loss(weights: Weights, y: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(spread(weights.layers, y, target)), jnp.full((), jnp.nan, y.dtype)

    return loss


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    name, width, layers, batch = row
    network = dataclasses.replace(NETWORKS[name](width, layers, batch), measure=half_mean_square)
    step = network.problem(network.weights, network.x)["step"]
    run = functools.partial(through, step, 1 / layers)
    mesh = jax.make_mesh((WORKERS,), ("layers",), axis_types=(AxisType.Auto,), devices=jax.devices()[:WORKERS])
    state = network.x.nbytes
    weights = sum(x.nbytes for x in jax.tree.leaves(network.weights.layers))

    def add(name: str, loss: Loss, spread: tuple[P, P] | None, **facts: Any) -> None:
        if contenders and not wanted(name, options):
            return
        tell(f"compiling {name}")
        steps = Trainer(loss, *_placed(network, mesh, spread))
        exact.append(steps.gradient)
        error = relative_error(steps.gradient, exact[0])
        facts |= {"threads": 1 if spread is None else WORKERS, "gradient_error": error}
        contenders.append(Contender(name=name, call=steps, facts=facts | steps.facts))

    contenders: list[Contender] = []
    exact: list[Any] = []
    add("lax.scan, 1 device", network.loss(), None, family="scan")
    summed = 2 * (WORKERS - 1) / WORKERS * weights
    add(
        "data parallel",
        data_parallel_loss(run, mesh),
        (P(), P("layers")),
        family="exact",
        counted_ratio=1 / WORKERS,
        bytes=summed,
    )
    for number in (m for m in MICROBATCHES if batch % m == 0):
        turns = number + WORKERS - 1
        for looped, how in ((True, ""), (False, ", unrolled")):
            add(
                f"pipeline, {number} microbatches{how}",
                pipeline_loss(run, mesh, number, looped=looped),
                (P("layers"), P()),
                family="torch",
                counted_ratio=turns / number / WORKERS,
                bubble=(WORKERS - 1) / turns,
                bytes=2 * turns * state / number,
            )
    for setting in ("identity, 2/1", "identity, 2/2", "3 levels, injection, 2/1, all stored"):
        solvers = SETTINGS[setting](layers, WORKERS)
        sent = planning.training_step(*solvers, layers, workers=WORKERS, at_once=1).states * state
        add(
            f"layer-parallel, {setting}",
            network.loss(solvers, lp_jax.MeshComm(mesh)),
            (P("layers"), P()),
            family="iterated",
            counted_ratio=counted_ratio(setting, layers, WORKERS),
            bytes=sent,
        )
    return Field(contenders, [])


def _placed(network: Network, mesh: Mesh, spread: tuple[P, P] | None) -> tuple[Weights, tuple[jax.Array, jax.Array]]:
    """Copies of weights and batch: on one device, or spread as said."""
    weights, *batch = jax.tree.map(jnp.array, (network.weights, network.x, network.target))
    if spread is not None:
        weights, batch = (
            jax.device_put(tree, NamedSharding(mesh, spec)) for tree, spec in zip((weights, batch), spread, strict=True)
        )
    return weights, tuple(batch)


SUITE = Suite(
    name="pipeline",
    title="Two devices: layers, examples, or a pipeline",
    about=__doc__ or "",
    examples=[
        ("", "all rows"),
        ("--quick", "tiny rows, to see that all works"),
        ("--rows dense,64,1024,32 --only pipeline", "one row, fewer contenders"),
    ],
    sizes=("network", "width", "layers", "batch"),
    rows="dense,64,256,32 dense,128,256,32 dense,64,1024,32 encoder,128,64,4 encoder,64,64,16",
    quick_rows="dense,4,32,4 encoder,8,32,4",
    field=field,
    row=network_row(("dense", "encoder")),
)


def main(arguments: Any = None) -> int:
    """Make two devices of a processor, and run."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "multi_thread_eigen" not in flags:  # a thread each
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if jax.config.jax_num_cpu_devices < WORKERS and "host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", WORKERS)
    if jax.device_count() < WORKERS:
        print(f"{WORKERS} devices are needed and there is one.", file=sys.stderr)
        return 1
    return run(SUITE, arguments)


if __name__ == "__main__":
    sys.exit(main())
