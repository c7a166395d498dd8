"""What every test shares: strict JAX settings, and the folder of reference files."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference models and values, which lies beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("the reference files (../shared) are not here: golden values are not compared")
    return SHARED
