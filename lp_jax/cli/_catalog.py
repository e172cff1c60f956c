"""What can be trained: problems, the models for each, and what their settings are if not said otherwise."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Settings of a model on a problem.

    Attributes:
        layers: number of layers; None where these are the steps of a sequence.
        width: size of the state, of it at each position, or number of channels.
        stride: of the opening convolution: the layers' states have so many times fewer points along each axis.
        t1: time at which the last layer ends; None is a step of 1 per layer.
        epochs: number of epochs.
        batch_size: examples per step.
        learning_rate: of Adam.
    """

    layers: int | None = 64
    width: int
    stride: int = 1
    t1: float | None = 2.0
    epochs: int
    batch_size: int = 50
    learning_rate: float = 3e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One that ``lp-jax train`` knows.

    Attributes:
        about: one line of help.
        files: what ``--data`` is to hold; None where nothing is needed.
        models: by name, the first one is taken if none is said.
        examples: of calls, for the help.
    """

    about: str
    files: str | None
    models: Mapping[str, Sizes]
    examples: tuple[tuple[str, str], ...]

    @property
    def model(self) -> str:
        """The model that is taken if none is said."""
        return next(iter(self.models))


MODELS = {
    "dense": "residual layers of a matrix each",
    "conv": "residual layers of two convolutions each",
    "pooled": "four blocks of convolutional layers with batch norm, halved images and more channels in between",
    "transformer": "self-attention and dense layers, causal for text",
    "gru": "gated recurrent units; the steps of the sequence are the layers",
}
RESNETS = ("dense", "conv", "pooled")
"""What ``--model resnet`` stands for: the first of these that a problem has."""

PROBLEMS = {
    "digits": Problem(
        about="Train on the 1,797 handwritten digits of scikit-learn; a fifth is held out.",
        files=None,
        models={"dense": Sizes(width=64, epochs=30), "conv": Sizes(width=8, epochs=30)},
        examples=(
            ("lp-jax train digits", "the demo: layer-parallel, then serial"),
            ("lp-jax train digits --serial --out runs/exact", "the exact baseline alone"),
            ("lp-jax train digits --levels 3 --coarsening 4,2 --cycle F", "three levels, another cycle"),
            ("lp-jax train digits --coarse-step inject --iterations 3", "the field's standard coarse step"),
            ("lp-jax train digits --iterations 3 --adjoint-iterations 2", "more cycles, fewer for the gradient"),
            ("lp-jax train digits --solver picard --sweeps 3", "fixed-point sweeps, no coarse level"),
            ("lp-jax train digits --model conv --layers 32 --epochs 10", "a convolutional network"),
            ("lp-jax train digits --devices 4", "the layers over four devices"),
            ("lp-jax train digits --mesh layers=2,data=2", "layers and examples over four devices"),
            ("mpirun -n 4 lp-jax train digits --mpi", "the layers over four MPI ranks"),
            ("lp-jax train digits --resume", "go on after an interruption"),
        ),
    ),
    "mnist": Problem(
        about="Train on MNIST, Fashion-MNIST or the like, from IDX files.",
        files="folder of the four IDX files, plain or .gz",
        models={"dense": Sizes(width=64, epochs=5), "conv": Sizes(layers=32, width=8, t1=1.0, epochs=5)},
        examples=(
            ("lp-jax train mnist --data ~/mnist", "a dense network"),
            ("lp-jax train mnist --data ~/mnist --model conv", "a convolutional one"),
            ("lp-jax train mnist --resume", "go on after an interruption"),
        ),
    ),
    "peaks": Problem(
        about="Train on 5,000 points of the plane in five level sets of the peaks function.",
        files=None,
        models={"dense": Sizes(width=8, t1=5.0, epochs=50, batch_size=40, learning_rate=1e-2)},
        examples=(("lp-jax train peaks --layers 256", "a deep, narrow network"),),
    ),
    "gum": Problem(
        about="Tag the words of a treebank, GUM or the like, with their parts of speech.",
        files="folder of the CoNLL-U files ...-train.conllu, ...-dev.conllu and ...-test.conllu, plain or .gz",
        models={
            "transformer": Sizes(width=64, t1=4.0, epochs=5, batch_size=32, learning_rate=1e-3),
        },
        examples=(("lp-jax train gum --data ~/gum", "an encoder of 64 layers"),),
    ),
    "timeseries": Problem(
        about="Classify time series of the UCR and UEA archives, from .ts files.",
        files="folder of NAME_TRAIN.ts and NAME_TEST.ts, plain or .gz",
        models={"gru": Sizes(layers=None, width=64, t1=None, epochs=60, batch_size=10)},
        examples=(
            ("lp-jax train timeseries --data ~/ucr --name BasicMotions", "six channels, 100 steps"),
            ("lp-jax train timeseries --data ~/ucr --name JapaneseVowels --epochs 30", "of different lengths"),
        ),
    ),
    "text": Problem(
        about="Model a text character by character; a tenth is held out.",
        files="a text file, or a treebank (.conllu)",
        models={"transformer": Sizes(layers=16, width=64, t1=None, epochs=5, batch_size=32, learning_rate=1e-3)},
        examples=(("lp-jax train text --data book.txt --buffers 2", "two serial layers at either end"),),
    ),
    "indianpines": Problem(
        about="Classify the pixels of the Indian Pines scene by their spectra.",
        files="folder of Indian_pines_corrected.mat and Indian_pines_gt.mat",
        models={"dense": Sizes(width=128, t1=2.0, epochs=30)},
        examples=(("lp-jax train indianpines --data ~/pines", "a dense network"),),
    ),
    "modelnet": Problem(
        about="Classify shapes, ModelNet10 or the like, in voxels.",
        files="folder of CLASS/train/*.off and CLASS/test/*.off, or of voxels_train.npz and voxels_test.npz",
        models={"conv": Sizes(layers=64, width=4, stride=2, epochs=3, batch_size=16)},
        examples=(
            ("lp-jax train modelnet --data ~/ModelNet10", "three-dimensional convolutions"),
            (
                "lp-jax train modelnet --data ~/ModelNet10 --relaxation FCF --spatial 3",
                "coarser in space on the coarse level",
            ),
        ),
    ),
    "tinyimagenet": Problem(
        about="Classify the images of Tiny ImageNet.",
        files="the unpacked folder, with train/ and val/",
        models={"pooled": Sizes(layers=32, width=16, t1=1.0, epochs=5)},
        examples=(("lp-jax train tinyimagenet --data ~/tiny-imagenet-200", "four blocks of layers"),),
    ),
}


def resolved(problem: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, those that depend on problem and model filled in."""
    known = PROBLEMS[problem].models
    model = options["model"] or PROBLEMS[problem].model
    if model == "resnet":
        model = next(name for name in RESNETS if name in known)
    sizes = dataclasses.asdict(known[model])
    given = {name: options[name] for name in sizes if options[name] is not None}
    return {**options, **sizes, **given, "model": model}
