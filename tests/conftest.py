"""What every test shares: strict JAX settings, and the folder of reference files."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib
import pytest
from console import Run, reset_flags

from jllama import cli

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling is most of what the tests take, so the programs stay for the next run.
PROGRAMS = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jllama-tests" / f"jaxlib-{jaxlib.__version__}"
)
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """Let go of compiled programs before there are too many: a process may have 65,530 mappings of memory."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference models and values, which lies beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("the reference files (../shared) are not here: golden values are not compared")
    return SHARED


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        reset_flags()
        capfd.readouterr()
        own = [] if args[:1] in (("pull",), ("list",), ("rm",)) else ["--compile_cache="]  # the user's is not for tests
        code = cli.main(["jllama", *own, *args])
        return code, *capfd.readouterr()

    yield call
    reset_flags()
