r"""Layers over several devices: relay, pipeline, MGRIT. A script to read, to copy and to change.

    python notebooks/examples/several_devices.py --devices 4

prints the seconds of a gradient and its relative error, and draws several_devices.png. Each device has its own part of the
layers. In a relay one device computes, and hands its result to the next one. The pipeline sends one microbatch after another the
same way, so that several devices work. MGRIT lets all devices begin at once, each on a guess of its input, and corrects the
guesses in cycles. This has an error, but more cycles make it smaller.

Without accelerators the processor is cut into as many devices. They share its cores, so the errors hold, but the seconds say
little. On GPUs leave out the line with ``jax_num_cpu_devices``. docs/workers.md compares the ways on emulated devices.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lp_jax


def layer(y, at):
    first, second = at.params
    return y + at.dt * jnp.tanh(y @ first) @ second


def loss(params, x, **options):
    return jnp.mean((lp_jax.solve(layer, params, x, t1=4.0, **options).y1 - 1) ** 2)


def ways(layers, devices, microbatches, mesh):
    """Return the losses to compare, by name; the first one is that of a single device."""
    comm = lp_jax.MeshComm(mesh)
    piped = lp_jax.pipeline(loss, mesh, in_axes=(None, 0))

    def pipeline(params, x):
        return piped(params, x.reshape(microbatches, -1, x.shape[-1])).mean()

    def spread(solver):
        return lambda params, x: loss(params, x, solver=solver, comm=comm)

    def one_interval_each(cycles):
        return lp_jax.MGRIT(
            coarsening=layers // devices,
            iterations=cycles,
            coarse_step=lp_jax.Identity(),
            start="guess",
            storage="all",
        )

    return {
        "one device": lambda params, x: loss(params, x, solver=lp_jax.Serial()),
        "relay": spread(lp_jax.Serial()),
        f"pipeline, {microbatches} microbatches": pipeline,
        "one interval each, 1 cycle": spread(one_interval_each(1)),
        "one interval each, 2 cycles": spread(one_interval_each(2)),
        "intervals of 4, 2 cycles": spread(lp_jax.MGRIT(coarsening=4, iterations=2)),
    }


def seconds_of(f, *args, repeats=5):
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def said(error):
    return f"error {error:.0e}" if error else "exact"


def main():
    parser = argparse.ArgumentParser(description="Gradients over several devices.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", args.devices)  # on a machine without accelerators
    mesh = jax.make_mesh((args.devices,), ("layers",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    shape = args.layers, args.width, args.width
    params = [jax.random.normal(key, shape) / args.width**0.5 for key in keys[:2]]
    x = jax.random.normal(keys[2], (args.batch, args.width))
    # Each device holds its own layers.
    spread = jax.device_put(params, NamedSharding(mesh, PartitionSpec("layers")))

    exact, seconds, errors = None, {}, {}
    for name, f in ways(args.layers, args.devices, args.microbatches, mesh).items():
        gradient = jax.jit(jax.grad(f))
        where = params if exact is None else spread
        found = jax.device_get(gradient(where, x))  # This call compiles.
        exact = found if exact is None else exact
        apart = optax.tree.sub(found, exact)
        errors[name] = float(optax.tree.norm(apart) / optax.tree.norm(exact))
        seconds[name] = seconds_of(gradient, where, x)
        print(f"{name:30} {seconds[name]:8.4f} s   {said(errors[name])}")

    fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    names = list(seconds)[::-1]  # The first one goes to the top.
    bars = ax.barh(names, [seconds[name] for name in names])
    ax.bar_label(bars, [f" {said(errors[name])}" for name in names])
    ax.set(xlabel="seconds for a gradient", xlim=(0, 1.25 * ax.get_xlim()[1]))
    ax.set_title(f"{args.layers} layers on {args.devices} devices ({jax.devices()[0].device_kind})")
    fig.savefig("several_devices.png")
    print("wrote several_devices.png")


if __name__ == "__main__":
    main()
