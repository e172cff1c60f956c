"""``lp-jax plan``: recommend a solver for a network, and predict its time."""

import argparse
import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from lp_jax import data, planning, train
from lp_jax.cli._menu import Parser, positive
from lp_jax.cli._network import network


def run(problem: str, args: Sequence[str]) -> None:
    """Print the plan of the digits, or of a machine file."""
    parser = (_digits_parser if problem == "digits" else _machine_parser)(f"lp-jax plan {problem}")
    parser.add("workers", positive, 1, "Number of devices that the layers are spread over.")
    parser.add("error", float, 1e-2, "Largest relative error of the gradient.", metavar="X")
    parser.add("out", Path, None, "Folder for plan.png.", metavar="FOLDER")
    options = parser.parse_args(args)
    if options.workers > options.layers:
        parser.error(
            f"--workers must be from 1 to the {options.layers} layers; got {options.workers}."
        )
    plan = (_digits if problem == "digits" else _machine)(options)
    print(plan)
    if options.out is not None:
        # Matplotlib is imported only for a picture, because it takes long to import.
        from lp_jax import viz

        options.out.mkdir(parents=True, exist_ok=True)
        viz.plan(plan).savefig(options.out / "plan.png")
        print(f"\nIn {options.out}: plan.png")


def _machine_parser(name: str) -> Parser:
    about = (
        "Predict times from a machine file, which lp-jax plan digits --save FILE writes. Gradient\n"
        "errors stay unknown."
    )
    call = f"{name} machine.json --layers 1024"
    parser = Parser(name, about, [(call, "of as many layers as those that were measured")])
    parser.add_argument("file", type=Path, help="Machine file.")
    parser.add_argument(
        "--layers", type=positive, metavar="N", required=True, help="Number of layers."
    )
    return parser


def _machine(options: argparse.Namespace) -> planning.Plan:
    machine = planning.Machine.load(options.file)
    return planning.choose(options.layers, machine, workers=options.workers, error=options.error)


def _digits_parser(name: str) -> Parser:
    about = (
        "Recommend a solver for a dense residual network that learns scikit-learn's digits, and\n"
        "predict its time. Nothing is trained. For a network of your own: lp_jax.plan, or\n"
        "lp_jax.train.plan."
    )
    call = f"{name} --workers 8 --error 1e-3 --save machine.json"
    told = "for eight such devices, a closer gradient; keep what was measured"
    parser = Parser(name, about, [(call, told)])
    parser.add("layers", positive, 64, "Number of layers.")
    parser.add("width", positive, 64, "Size of the state.")
    parser.add("batch-size", positive, 50, "Number of examples of a step.")
    parser.add("t1", float, 2.0, "Time at which the last layer ends.", metavar="X")
    parser.add("machine", Path, None, "Machine file, to read instead of measuring.", metavar="FILE")
    parser.add("save", Path, None, "File to store the measurements in.", metavar="FILE")
    parser.add("seconds", float, 10.0, "Seconds to time layers and probe gradients.", metavar="X")
    return parser


def _digits(options: argparse.Namespace) -> planning.Plan:
    workers = options.workers
    model = network(options.layers, width=options.width, t1=options.t1)
    machine, comm = None, None
    if options.machine is not None:
        machine = planning.Machine.load(options.machine)
    # Messages can be measured only if the devices are here; otherwise the plan takes their times as zero.
    elif jax.device_count() >= workers > 1:
        comm = jax.make_mesh((workers,), ("layers",), devices=jax.devices()[:workers])
    plan = train.plan(
        model,
        train.classification(model)[1],
        next(data.batches(data.digits(), options.batch_size, seed=0, epoch=0)),
        workers=workers,
        machine=machine,
        comm=comm,
        error=options.error,
        seconds=options.seconds,
    )
    if machine is None:
        # The name goes into the machine file, so that a later plan says where and on what the times were measured.
        name = f"{jax.devices()[0].device_kind} ({platform.machine()}), digits, dense"
        plan = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, name=name))
    if options.save is not None:
        plan.machine.save(options.save)
    return plan
