"""Time series: the .ts format, problems of the archives."""

import gzip

import numpy as np
import pytest
from data_files import refused, write

from lp_jax import data
from lp_jax.data._timeseries import read_ts

HEADER = """# a comment
@problemName Some Problem
@timeStamps false
@missing false
@univariate false
@dimensions 2
@classLabel true up down
@data
"""
BODY = "1,2,3:4,5,6:up\n7:8:down\n\n# between\n1.5,-2e1:0,.5:down\n"


def test_series_of_a_file(tmp_path):
    for name in ("a.ts", "a.ts.gz"):
        for text in (HEADER + BODY, (HEADER + BODY).replace("\n", "\r\n"), HEADER.lower() + BODY):
            got = read_ts(write(tmp_path / name, text))
            assert got.classes == ("up", "down") and got.labels == ["up", "down", "down"]
            assert [x.tolist() for x in got.x] == [
                [[1, 4], [2, 5], [3, 6]],
                [[7, 8]],
                [[1.5, 0], [-20, 0.5]],
            ]
            assert all(x.dtype == np.float64 for x in got.x)


def test_missing_values_are_filled(tmp_path):
    path = write(tmp_path / "a.ts", HEADER + "1,?,3:4,5,NaN:up\n")
    assert read_ts(path, fill=-1.0).x[0].tolist() == [[1, 4], [-1, 5], [3, -1]]
    path = write(tmp_path / "b.ts", HEADER + "1,2:3,-inf:up\n")
    refused(f"{path}: line 9: the series holds -inf at ", read_ts, path, fill=0.0)


def header(**keys):
    """The header without some keys and with others."""
    kept = [
        line
        for line in HEADER.splitlines()
        if not line.startswith(tuple(f"@{key} " for key in keys))
    ]
    return (
        "\n".join(
            [*kept[:-1], *(f"@{key} {value}" for key, value in keys.items() if value), "@data"]
        )
        + "\n"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (header(dimensions="") + "1:2:up\n1:2:3:up\n", "line 9: 3 channels; wanted 2"),
        (
            header(dimensions="") + "up\n",
            "line 8: channels of [] values; wanted at least one channel",
        ),
        (
            HEADER + "1,2:3:up\n",
            "line 9: channels of [2, 1] values; wanted at least one channel, all of one length",
        ),
        (
            HEADER + "1,2:3,4\n",
            "line 9: class '3,4'; wanted one of those that the header announces, up down",
        ),
        (HEADER + "1,2:3,4:UP\n", "line 9: class 'UP'; wanted one of those"),
        (
            HEADER + "1,2:3,x:up\n",
            "line 9: could not convert string to float: 'x'; wanted numbers with commas between",
        ),
        (HEADER + "1,2:3,:up\n", "line 9: could not convert string to float: ''; wanted numbers"),
        (HEADER + "1,?:3,4:up\n", "line 9: the series holds nan at "),
        (
            HEADER + "1,2:3,1e308:up\n",
            "line 9: the series holds 1e+308 at [1, 1]; wanted finite numbers",
        ),
        (HEADER + "1,2:3,nan:up\n", "line 9: the series holds nan at "),
        (
            header(timeStamps="true") + BODY,
            "a problem of regression, or series with time stamps; wanted classes,",
        ),
        (
            header(targetLabel="true") + BODY,
            "a problem of regression, or series with time stamps; wanted classes,",
        ),
        (header(classLabel="true") + BODY, "classes none; wanted at least one, none of them twice"),
        (
            header(classLabel="false") + BODY,
            "classes none; wanted at least one, none of them twice, announced by @cl",
        ),
        (header(classLabel="true a b a") + BODY, "classes a b a; wanted at least one"),
        (
            HEADER.replace("@data\n", "") + BODY,
            "no header, or more in it than keys and comments; wanted keys (@...)",
        ),
        (
            HEADER.replace("@data\n", BODY + "@data\n"),
            "no header, or more in it than keys and comments; wanted",
        ),
        (HEADER, "no series; wanted one a line after @data"),
    ],
)
def test_malformed_series_are_refused(tmp_path, content, expected):
    for name in ("a.ts", "a.ts.gz"):
        path = write(tmp_path / name, content)
        refused(f"{path}: {expected}", read_ts, path)


def problem(folder, train=BODY, test=BODY, test_header=HEADER):
    write(folder / "P_TRAIN.ts", HEADER + train)
    write(folder / "P_TEST.ts.gz", test_header + test)
    return folder


def test_series_are_scaled_by_training_and_padded(tmp_path):
    got = data.timeseries(
        problem(tmp_path, "0,2:5,5:up\n4,6,8:5,5,5:down\n", "4,14,4,4:5,6,7,8:up\n"), "P"
    )
    (x, lengths), (test_x, test_lengths) = got.train_x, got.test_x
    assert got.shape == (4, 2) and got.classes == 2 and got.names == ("up", "down")
    assert (
        x.shape == (2, 4, 2) and test_x.shape == (1, 4, 2) and x.dtype == test_x.dtype == np.float32
    )
    assert lengths.tolist() == [2, 3] and test_lengths.tolist() == [4] and lengths.dtype == np.int32
    assert (
        got.train_y.tolist() == [0, 1]
        and got.test_y.tolist() == [0]
        and got.train_y.dtype == np.int32
    )
    deviation = np.sqrt((16 + 4 + 0 + 4 + 16) / 5)  # of 0 2 4 6 8 about 4
    np.testing.assert_allclose(x[0, :, 0], [-4 / deviation, -2 / deviation, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(test_x[0, :, 0], [0, 10 / deviation, 0, 0], rtol=1e-6)
    # a channel that never changes in training
    assert np.all(x[..., 1] == 0) and test_x[0, :, 1].tolist() == [0, 1, 2, 3]


LEFT, THREE = header(classLabel="true up down left"), header(dimensions="3")
UNSEEN = "which no training series has; wanted one of"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"train": "1:2:up\n", "test": "1:2:up\n3:4:down\n"},
            f"TEST.ts.gz: class 'down', {UNSEEN} up.",
        ),
        (
            {"test_header": LEFT, "test": "3:4:left\n"},
            f"TEST.ts.gz: class 'left', {UNSEEN} down up.",
        ),
        (
            {"test_header": THREE, "test": "1:2:3:up\n"},
            "TEST.ts.gz: 3 channels; wanted 2, like those to train with",
        ),
        ({"train": "1:?:up\n"}, "TRAIN.ts: line 9: the series holds nan at "),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, options, expected):
    folder = problem(tmp_path, **options)
    refused(f"{folder}/P_{expected}", data.timeseries, folder, "P")
    (folder / "P_TEST.ts.gz").unlink()
    refused(
        f"{folder}: has no file P_TEST.ts or P_TEST.ts.gz; wanted the two files",
        data.timeseries,
        folder,
        "P",
    )


def test_missing_values_of_a_problem_are_filled_before_scaling(tmp_path):
    got = data.timeseries(problem(tmp_path, "0,?:1,1:up\n", "?:0:up\n"), "P", fill=2.0)
    assert got.train_x[0][0, :, 0].tolist() == [-1, 1] and got.test_x[0][0, 0, 0] == 1


@pytest.mark.parametrize(
    ("name", "train", "test", "classes", "lengths"),
    [
        ("BasicMotions", (40, 100, 6), (40, 100, 6), 4, (100, 100)),
        ("JapaneseVowels", (270, 29, 12), (370, 29, 12), 9, (7, 29)),
        ("ACSF1", (100, 1460, 1), (100, 1460, 1), 10, (1460, 1460)),
    ],
)
def test_real_series(shared_data, name, train, test, classes, lengths):
    got = data.timeseries(shared_data / "ucr", name)
    (x, n), (test_x, test_n) = got.train_x, got.test_x
    assert (
        x.shape == train
        and test_x.shape == test
        and got.shape == train[1:]
        and got.classes == classes
    )
    assert min(n.min(), test_n.min()) == lengths[0] and max(n.max(), test_n.max()) == lengths[1]
    assert np.all(np.bincount(got.train_y) == train[0] // classes)
    inside = np.arange(train[1]) < n[:, None]
    np.testing.assert_allclose(x[inside].mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(x[inside].std(0), 1, rtol=1e-4)
    assert np.all(x[~inside] == 0) and np.all(test_x[np.arange(train[1]) >= test_n[:, None]] == 0)
    # as it stands in the file, up to scale
    with gzip.open(shared_data / "ucr" / f"{name}_TRAIN.ts.gz", "rt") as lines:
        line = next(line for line in iter(lines.readline, "") if not line.startswith(("#", "@")))
    raw = np.array([channel.split(",") for channel in line.split(":")[:-1]], float).T
    for channel, values in enumerate(raw.T):
        assert np.corrcoef(values, x[0, : len(raw), channel])[0, 1] > 1 - 1e-6
