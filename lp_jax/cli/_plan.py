"""``lp-jax plan``: recommend a solver for a network, and predict its time."""

import argparse
import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import AxisType

from lp_jax import MeshComm, data, nn, planning, train
from lp_jax.cli._menu import Parser, positive


def run(problem: str, args: Sequence[str]) -> None:
    """Print the plan of the digits, or of a machine file."""
    about, call, told = {
        "digits": (
            "Recommend a solver for a dense residual network that learns scikit-learn's digits, and\n"
            "predict its time. Nothing is trained. For a network of your own: lp_jax.plan, or\n"
            "lp_jax.train.plan.",
            "--workers 8 --error 1e-3 --save machine.json",
            "for eight such devices, a closer gradient; keep what was measured",
        ),
        "machine": (
            "Predict times from a machine file, which lp-jax plan digits --save FILE writes. Gradient\n"
            "errors stay unknown.",
            "machine.json --layers 1024",
            "of as many layers as those that were measured",
        ),
    }[problem]
    name = f"lp-jax plan {problem}"
    parser = Parser(name, about, [(f"{name} {call}", told)])
    add = parser.add_argument
    about = "Number of devices that the layers are spread over."
    add("--workers", type=positive, metavar="N", default=1, help=about)
    about = "Largest relative error of the gradient."
    add("--error", type=float, metavar="X", default=1e-2, help=about)
    add("--out", type=Path, metavar="FOLDER", help="Folder for plan.png.")
    plan = (_digits if problem == "digits" else _machine)(parser, args)
    print(plan)
    out = parser.parse_args(args).out
    if out is not None:
        from lp_jax import viz

        out.mkdir(parents=True, exist_ok=True)
        viz.plan(plan).savefig(out / "plan.png")
        print(f"\nIn {out}: plan.png")


def _machine(parser: argparse.ArgumentParser, args: Sequence[str]) -> planning.Plan:
    add = parser.add_argument
    add("file", type=Path, help="Machine file.")
    add("--layers", type=positive, metavar="N", required=True, help="Number of layers.")
    options = parser.parse_args(args)
    machine = planning.Machine.load(options.file)
    return planning.choose(options.layers, machine, workers=options.workers, error=options.error)


def _digits(parser: argparse.ArgumentParser, args: Sequence[str]) -> planning.Plan:
    add = parser.add_argument
    for name, default, about in (
        ("layers", 64, "Number of layers."),
        ("width", 64, "Size of the state."),
        ("batch-size", 50, "Number of examples of a step."),
    ):
        add(f"--{name}", type=positive, metavar="N", default=default, help=about)
    about = "Time at which the last layer ends."
    add("--t1", type=float, metavar="X", default=2.0, help=about)
    about = "Machine file, to read instead of measuring."
    add("--machine", type=Path, metavar="FILE", help=about)
    add("--save", type=Path, metavar="FILE", help="File to store the measurements in.")
    about = "Seconds to time layers and probe gradients."
    add("--seconds", type=float, metavar="X", default=10.0, help=about)
    options = parser.parse_args(args)
    workers = options.workers
    if workers > options.layers:
        parser.error(f"--workers must be from 1 to the {options.layers} layers; got {workers}.")
    dataset = data.digits()
    width, rngs = options.width, nnx.Rngs(0)
    opening = nn.DenseOpening(dataset.shape, width, rngs=rngs)
    make = lambda rngs: nn.DenseResidual(width, rngs=rngs)  # noqa: E731
    trunk = nn.LayerParallel(make, options.layers, t1=options.t1, rngs=rngs)
    model = nn.Classifier(opening, trunk, nn.DenseClosing((width,), dataset.classes, rngs=rngs))
    machine, comm = None, None
    if options.machine is not None:
        machine = planning.Machine.load(options.machine)
    elif jax.device_count() >= workers > 1:
        devices = jax.devices()[:workers]
        comm = MeshComm(jax.make_mesh((workers,), ("layers",), (AxisType.Auto,), devices=devices))
    plan = train.plan(
        model,
        train.classification(model)[1],
        next(data.batches(dataset, options.batch_size, seed=0, epoch=0)),
        workers=workers,
        machine=machine,
        comm=comm,
        error=options.error,
        seconds=options.seconds,
    )
    if machine is None:
        name = f"{jax.devices()[0].device_kind} ({platform.machine()}), digits, dense"
        plan = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, name=name))
    if options.save is not None:
        plan.machine.save(options.save)
    return plan
