"""Classify the images of Tiny ImageNet."""

from lp_jax.cli._models import Pooled
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Training, task_of
from lp_jax.data import contrib

PROBLEM = Problem(
    load=lambda training, data: task_of(contrib.tiny_imagenet(data), training),
    models={"pooled": Pooled(layers=32, width=16, t1=1.0)},
    training=Training(epochs=5),
    sources={"data": "The unpacked folder, with train/ and val/."},
    examples=(("lp-jax train tinyimagenet --data ~/tiny-imagenet-200", "four blocks of layers"),),
)
