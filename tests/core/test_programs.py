"""The reader of compiled programs: on texts with counts by hand, and on what XLA makes of a small one for a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lp_jax
from benchmarks import hlo, networks, program, tpu_costs
from lp_jax import planning

BENCHMARKS = Path(program.__file__).parent

TEXT = """HloModule jit_f, is_scheduled=true

%fused_step (param_0.1: f32[8,4,4], param_1.1: f32[2,4], param_2.1: s32[]) -> f32[2,4] {
  %param_1.1 = f32[2,4]{1,0} parameter(1)
  %param_0.1 = f32[8,4,4]{2,1,0} parameter(0)
  %param_2.1 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice.1 = f32[1,4,4]{2,1,0} dynamic-slice(%param_0.1, %param_2.1, %zero, %zero), dynamic_slice_sizes={1,4,4}
  %bitcast.1 = f32[4,4]{1,0} bitcast(%slice.1)
  %dot.1 = f32[2,4]{1,0} dot(%param_1.1, %bitcast.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %add.1 = f32[2,4]{1,0} add(%dot.1, %param_1.1)
}

%fused_put (param_0.2: f32[8,2,4], param_1.2: f32[2,4], param_2.2: s32[]) -> f32[8,2,4] {
  %param_0.2 = f32[8,2,4]{2,1,0} parameter(0)
  %param_1.2 = f32[2,4]{1,0} parameter(1)
  %bitcast.2 = f32[1,2,4]{2,1,0} bitcast(%param_1.2)
  %param_2.2 = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  ROOT %put.2 = f32[8,2,4]{2,1,0} dynamic-update-slice(%param_0.2, %bitcast.2, %param_2.2, %zero.2, %zero.2)
}

%body (carry: (s32[], f32[2,4], f32[8,4,4], f32[8,2,4])) -> (s32[], f32[2,4], f32[8,4,4], f32[8,2,4]) {
  %carry = (s32[], f32[2,4]{1,0}, f32[8,4,4]{2,1,0}, f32[8,2,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %y = f32[2,4]{1,0} get-tuple-element(%carry), index=1
  %w = f32[8,4,4]{2,1,0} get-tuple-element(%carry), index=2
  %all = f32[8,2,4]{2,1,0} get-tuple-element(%carry), index=3
  %step = f32[2,4]{1,0} fusion(%w, %y, %i), kind=kCustom, calls=%fused_step
  %send-start = (f32[2,4]{1,0}, f32[2,4]{1,0}) collective-permute-start(%step), source_target_pairs={{0,1}}
  %put = f32[8,2,4]{2,1,0} fusion(%all, %step, %i), kind=kLoop, calls=%fused_put
  %send-done = f32[2,4]{1,0} collective-permute-done(%send-start)
  ROOT %tuple = (s32[], f32[2,4]{1,0}, f32[8,4,4]{2,1,0}, f32[8,2,4]{2,1,0}) tuple(%i, %send-done, %w, %put)
}

%condition (state: (s32[], f32[2,4], f32[8,4,4], f32[8,2,4])) -> pred[] {
  %state = (s32[], f32[2,4]{1,0}, f32[8,4,4]{2,1,0}, f32[8,2,4]{2,1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (y0: f32[2,4], ws: f32[8,4,4]) -> f32[8,2,4] {
  %y0 = f32[2,4]{1,0} parameter(0)
  %ws = f32[8,4,4]{2,1,0} parameter(1)
  %none = s32[] constant(0)
  %room = f32[8,2,4]{2,1,0} copy(%y0)
  %start = (s32[], f32[2,4]{1,0}, f32[8,4,4]{2,1,0}, f32[8,2,4]{2,1,0}) tuple(%none, %y0, %ws, %room)
  %while = (s32[], f32[2,4]{1,0}, f32[8,4,4]{2,1,0}, f32[8,2,4]{2,1,0}) while(%start), condition=%condition, body=%body, KNOWN
  ROOT %found = f32[8,2,4]{2,1,0} get-tuple-element(%while), index=3
}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"8"}}'
LAUNCHES = """000: kCopy           [source | next=001] kCopy
001: kWhile          [prev=000 | next=006]
condition:
    002: kCustomKernel [source | sink] compare
  body:
    003: kCustomKernel [source | next=004] step
    004: kCommandBuffer [prev=003 | sink]
        005: kCustomKernel [source | sink] put
        006: kAsyncStart [source | next=008] stream=communication_stream[0], async_id=6
            007: kCollectivePermute [source | sink] kCollectivePermute
        008: kAsyncDone [source | sink] async_id=6
"""
STATE, LAYER = 2 * 4 * 4, 4 * 4 * 4  # bytes


@pytest.fixture
def read():
    return hlo.Program(TEXT.replace("KNOWN", KNOWN), LAUNCHES)


def test_kernels_loops_and_messages(read):
    assert read.launched == 1 + 3 * 8
    assert read.loops == [hlo.Loop("body", 8, 1, 3)]
    assert read.collectives() == {"collective-permute": 8}
    assert read.overlaps == [("collective-permute", 1)]
    assert read.products() == {(1, 2, 4, 4): 8}
    assert read.flops == 8 * 2 * 2 * 4 * 4
    assert (read.unknown, read.scatters()) == (0, 0)
    assert read.launches == hlo.Launches(alone=1 + 8, graphs=8, in_graphs=16)
    of_unknown_length = hlo.Program(TEXT.replace(", KNOWN", ""))
    assert (of_unknown_length.unknown, of_unknown_length.launched, of_unknown_length.launches) == (
        1,
        4,
        None,
    )


def test_bytes_are_those_that_are_asked_for(read):
    """A slice of the weights; an update without what is around it."""
    moved = {kernel.name: kernel.nbytes for kernel in read.kernels}
    index = 4
    assert moved["step"] == LAYER + STATE + index + STATE
    assert moved["put"] == STATE + index + STATE
    assert moved["room"] == STATE + 8 * STATE


def test_a_small_network_compiled_for_a_gpu(tmp_path):
    """Run as users run it, in a process whose environment hides the plugin; without its compiler it says what to install."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.program",
        "--quick",
        "--only",
        "Serial",
        "Picard, 8 sweeps",
    ]
    paths = f"{BENCHMARKS.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if importlib.util.find_spec("jax_plugins") is None:
        assert done.returncode == 2
        assert "lp_jax[gpu-program]" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "program.json").read_text())["rows"]
    found = {one["name"]: one for one in row["contenders"]}
    assert (
        found["lax.scan"]["kernels"]
        > found["lax.scan, unroll=8"]["kernels"]
        > found["Picard, 8 sweeps"]["kernels"]
    )
    assert found["Picard, 8 sweeps"]["unknown"] == found["Picard, 8 sweeps"]["scatters"] == 0
    assert "| Picard, 8 sweeps" in (tmp_path / "program.md").read_text()


@pytest.mark.usefixtures("optimised")  # it runs each layer
def test_estimates_are_near_what_compiled_programs_count():
    """Within a factor of three, of programs whose loops have known lengths; of every other network."""
    rows = json.loads((BENCHMARKS / "results" / "h200" / "program.json").read_text())["rows"]
    compared = 0
    for row in rows[::2]:
        name, *sizes = row["title"].replace(",", "").split()
        width, layers, batch = (int(word) for word in sizes if word.isdigit())
        network = networks.NETWORKS[name](width, layers, batch)
        problem = lp_jax.Problem(**network.problem(network.weights, network.x, networks.SERIAL))
        machine = planning.estimate(problem, device="H200")
        pairs = program.contenders(name, layers)
        for one in row["contenders"]:
            pair = pairs[one["name"]]
            if isinstance(pair, int) or one["unknown"]:
                continue
            predicted = planning.predict(*pair, layers, machine).seconds
            assert 1 / 3 < predicted / one["model_seconds"] < 3, (row["title"], one["name"])
            compared += 1
    assert compared > 25


A_TPUS = """HloModule m

%count (p: (s32[])) -> pred[] {
  %c = s32[]{:T(128)} constant(8)
  ROOT %lt = pred[]{:T(512)} compare(%g, %c), direction=LT
}

%unmet (p: (s32[])) -> pred[] {
  %c = s32[]{:T(128)} constant(32)
  ROOT %and = pred[]{:T(512)} and(%g, %h)
}

%layer (p: (s32[])) -> (s32[]) {
  %a = f32[8]{0} fusion(%p), kind=kLoop, backend_config={"window_config":{"estimated_cycles":"10"}}
}

%sweep (p: (s32[])) -> (s32[]) {
  %b = f32[8]{0} fusion(%p), kind=kLoop, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %s = f32[8]{0} collective-permute-start(%b), source_target_pairs={{0,1}}
}

%serial (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%p), condition=%count, body=%layer
}

ENTRY %main (p: s32[]) -> s32[] {
  %w = (s32[]) while(%t), condition=%count, body=%layer
  %x = (s32[]) while(%t), condition=%unmet, body=%sweep
  %y = (s32[]) while(%t), condition=%unmet, body=%sweep, metadata={op_name="jit(_backward)/while"}
  %z = (s32[]) while(%t), condition=%unmet, body=%serial
}
"""


def test_cycles_of_a_tpus_program():
    """Loops by their turns: known ones, iterations forward and adjoint; no serial propagation after a tolerance that is met."""
    assert tpu_costs.counted(A_TPUS, 8, (5, 3)) == (80 + 8_000, 8 + 8, {"collective-permute": 8}, 3)
    assert tpu_costs.counted(A_TPUS, 8, (1, 1)).cycles == 80 + 2_000 + 80  # a relay's turns
