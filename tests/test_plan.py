"""The plan of a model: numbers worked out by hand, and that nothing is allocated for them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from console import Run, error

from jllama import checkpoint, plan
from jllama.config import from_toml
from jllama.mesh import Shape
from jllama.model import init_cache
from jllama.plan import Device

ROOT = Path(__file__).resolve().parents[1]

# Of Llama 2 70B, by its published sizes: 64 query heads and 8 key heads of 128, a feed-forward of 28,672.
D, F, L, V = 8192, 28672, 80, 32000
LAYER = D * (64 + 8 + 8) * 128 + D * D + 3 * D * F
PARAMETERS = L * (LAYER + 2 * D) + D + 2 * V * D


def planned(name: str, dtype: str, mesh: Shape, batch: int, *devices: Device) -> plan.Plan:
    config = from_toml(ROOT / f"configs/{name}.toml")
    return plan.plan(checkpoint.random_contents(config), dtype, mesh, batch, devices or plan.DEVICES)


def test_70b_on_eight_devices_by_hand() -> None:
    assert PARAMETERS == 68_976_648_192
    big, small, tiny = (Device(name, memory, 1e12) for name, memory in (("b", 80e9), ("s", 28e9), ("t", 17e9)))
    found = planned("llama2_70b", "bfloat16", Shape(1, 8), 32, big, small, tiny)
    assert found.parameters == PARAMETERS
    assert found.rows == 32
    norms = 4 * (2 * L + 1) * D  # float32, whole on each device
    assert found.weights == 2 * (L * LAYER + 2 * V * D) // 8 + norms
    assert found.read == found.weights - 2 * V * D // 8  # of the embedding a step reads a few rows
    assert found.slot == 32 * L * 2 * 1 * 128 * 4  # one key head a device, float32
    fits = found.fits
    # 28 GB: 17.2 of weights leave 10.7. 2,048 slots take 5.4, and 2.7 more while they are copied; 4,096 take 10.7.
    assert [fit.context for fit in fits] == [4096, 2048, 0]
    assert fits[0].first == pytest.approx(32 * 1e12 / found.read)
    assert fits[0].last == pytest.approx(32 * 1e12 / (found.read + 4096 * found.slot))
    assert fits[1].last == pytest.approx(32 * 1e12 / (found.read + 2048 * found.slot))
    assert fits[2][2:] == (0.0, 0.0)


def test_the_parts_of_the_batch_and_of_the_model() -> None:
    whole, split = (planned("llama2_70b", "bfloat16", Shape(*shape), 32) for shape in ((1, 8), (4, 8)))
    assert (split.rows, split.weights, split.slot) == (8, whole.weights, whole.slot // 4)
    assert split.fits[4].first == pytest.approx(whole.fits[4].first)  # a quarter of the rows, four times the devices
    shared = planned("llama2_70b", "bfloat16", Shape(1, 16), 32)  # 8 key heads: two devices have the same
    assert shared.slot == whole.slot
    assert shared.weights > whole.weights / 2
    with pytest.raises(ValueError, match="n_heads = 64: expected a multiple of 3"):
        planned("llama2_70b", "bfloat16", Shape(1, 3), 32)


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 9), ("int4", 4.5)])
def test_bits_of_an_element(dtype: str, bits: float) -> None:
    found = planned("llama2_70b", dtype, Shape(1, 1), 1)
    assert found.weights == (L * LAYER + 2 * V * D) * bits / 8 + 4 * (2 * L + 1) * D


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_the_plan_is_what_a_model_takes(dtype: str) -> None:
    config = from_toml(ROOT / "configs/stories260K.toml")
    params = checkpoint.random(config, dtype=dtype)
    found = planned("stories260K", dtype, Shape(), 4)
    assert found.weights == found.read == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert found.slot * 256 == sum(leaf.nbytes for leaf in jax.tree.leaves(init_cache(params, 4, 256)))


def test_the_longest_context_is_the_last_that_fits() -> None:
    config = from_toml(ROOT / "configs/llama3.1_8b.toml")
    contents = checkpoint.random_contents(config)
    need = plan.plan(contents, "int8", Shape(), 2, [])
    for slots in (256, 512, 65536):
        peak = need.weights + need.slot * (slots if slots == 256 else slots * 3 // 2)  # the old cache is still there
        devices = [Device("", peak + more, 1e12) for more in (0, -1)]
        fits = plan.plan(contents, "int8", Shape(), 2, devices).fits
        assert [fit.context for fit in fits] == [slots, slots // 2 if slots > 256 else 0]


def test_the_command_line_plans(run: Run) -> None:
    flags = ["--mode=plan", f"--config={ROOT}/configs/llama2_70b.toml", "--dtype=bfloat16", "--batch_size=32"]
    code, out, err = run(*flags, "--mesh=model:8")
    assert (code, err) == (0, "")
    assert "68,976,648,192 parameters" in out
    assert "17.25 GB of weights" in out
    for words in (
        "TPU v5e .* does not fit",
        "TPU v6e .* 2,048 ",
        "A100 80GB .* 4,096 ",
        "H100 SXM ",
        "H200 .* 4,800 GB/s",
    ):
        assert re.search(words, out), words
    assert "2.68 GB of cache for 1,024 tokens of 32 rows" in out
    assert "1.34 GB of cache" in run(*flags, "--mesh=model:8", "--kv_dtype=bfloat16")[1]
    assert "24 GB" in run(*flags, "--mesh=model:8", "--memory=24")[1]
    assert "multiple of 7" in error(run(*flags, "--mesh=model:7"))
    assert "mesh = 'x'" in error(run(*flags, "--mesh=x"))
    assert "memory = -1" in error(run(*flags, "--memory=-1"))
    assert "batch_size = 0" in error(run(*flags, "--batch_size=0"))
    assert "stories" in run("--mode=plan")[1]  # the model that is taken where none is named


def test_a_checkpoint_is_planned_without_reading_it(run: Run, shared: Path) -> None:
    code, out, _ = run(
        "--mode=plan", f"--checkpoint={shared}/models/stories260K/stories260K.Q8_0.gguf", "--mesh=model:4"
    )
    assert code == 0
    assert "stories260K.Q8_0 in int8 on data:1,model:4" in out


def test_70b_is_planned_in_no_time_and_no_memory() -> None:
    code = (
        "import sys, time; from jllama.cli import main; assert main(sys.argv) == 0; "
        # Not ru_maxrss, which a child inherits from a big parent.
        "peak = [x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')]; "
        "print(time.process_time(), *peak)"
    )
    flags = ["--mode=plan", f"--config={ROOT}/configs/llama2_70b.toml", "--mesh=model:8", "--dtype=bfloat16"]
    command = [sys.executable, "-c", code, *flags, "--batch_size=32", "--compile_cache="]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, done.stdout.splitlines()[-1].split())
    assert seconds < 5
    assert kilobytes < 1 << 20
