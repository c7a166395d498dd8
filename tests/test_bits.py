"""With native kernels a row's logits are equal to the bit, however it is read and whoever is read beside it."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllama import checkpoint, kernels
from jllama.config import Config
from jllama.model import init_cache, prefill, step
from jllama.run import choose

CONFIG = Config(64, 192, 2, 8, 4, 97, 256)
TOKENS, NEW = 70, 3
pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.explain())
_prefill, _step = jax.jit(prefill), jax.jit(step)


def logits(dtype: str, width: int, rows: int) -> np.ndarray:
    """Logits of a row in the middle of others, its prompt read in blocks, after the prompt and each of a few tokens."""
    params = checkpoint.random(CONFIG, dtype=dtype, run=choose("native"))
    others = np.random.default_rng(rows).integers(3, 97, (rows, TOKENS), dtype=np.int32)
    others[rows // 2] = np.random.default_rng(0).integers(3, 97, TOKENS)
    cache, found = init_cache(params, rows, 256), []
    for first in range(0, TOKENS, width):
        block = others[:, first : first + width]
        length = jnp.full(rows, block.shape[1], jnp.int32)
        block = np.pad(block, ((0, 0), (0, width - block.shape[1])))
        out, cache = _prefill(params, cache, jnp.asarray(block), length, first)
    for i in range(NEW):
        found.append(np.asarray(out)[rows // 2])
        out, cache = _step(params, cache, jnp.full(rows, 7 + i, jnp.int32), jnp.full(rows, TOKENS + i, jnp.int32))
    return np.stack([*found, np.asarray(out)[rows // 2]])


@pytest.mark.parametrize(
    "dtype", ["float32", "int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "int4"))]
)
def test_a_row_is_the_same_to_the_bit(dtype: str) -> None:
    alone = logits(dtype, 16, 1)
    assert np.isfinite(alone).all()
    for width, rows in ((16, 32), (64, 1), (128, 3), (1, 1)):
        np.testing.assert_array_equal(logits(dtype, width, rows), alone, err_msg=f"{width} tokens of {rows} rows")


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["generic", "avx2", "avx512_bf16"])
def test_with_a_lower_instruction_set_and_one_thread(instructions: str) -> None:
    """Each set has bits of its own, which neither rows nor threads change."""
    code = "import test_bits; print(test_bits.digest(16, 1), test_bits.digest(64, 5))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JLLAMA_CPU": instructions}
    found = set()
    for cores in ({0}, os.sched_getaffinity(0)):
        done = subprocess.run(
            [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores}); {code}"],
            env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.update(done.stdout.split())
    assert len(found) == 1


def digest(width: int, rows: int) -> str:
    """Name the bits of some logits."""
    return hashlib.sha256(logits("int8", width, rows).tobytes()).hexdigest()
