"""Every family against transformers: its own tiny models, written by itself, and what it computes of them."""

import contextlib
import dataclasses
import json
from pathlib import Path

import gguf_families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import checkpoint, mesh
from jllama.checkpoint import CheckpointError, huggingface_config
from jllama.config import ConfigError
from jllama.decode import Stop, generate
from jllama.families import GGUF, HUGGINGFACE, Fields, config_of
from jllama.rotary import rotary_frequencies
from jllama.run import Run

FOLDERS = sorted(path for path in (Path(__file__).parent / "data" / "families").iterdir() if path.is_dir())

jit_generate = jax.jit(generate, static_argnames="slots")


def named(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_logits_and_greedy_ids_equal_those_of_transformers(folder: Path) -> None:
    expected = np.load(folder / "expected.npz")
    context = 64 if folder.name.endswith("-past") else None  # past the original length
    params = checkpoint.load(folder, dtype="float32", context=context)
    found = tiny.all_logits(params, expected["ids"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)
    # A ragged batch, and single steps past each prompt; equal layers as a stack.
    params = checkpoint.load(folder, dtype="float32", context=context, run=Run(stacked=True))
    assert params.layers[0].stacked == params.config.has_equal_layers
    length = np.array(expected.get("lengths", [7, 11]), np.int32)
    stop = Stop(jnp.array([-1], jnp.int32), jnp.array(length + 12))
    prompts = jnp.array(expected["ids"][:, : length[1]])
    tokens = np.array(jit_generate(params, prompts, jnp.array(length), tiny.greedy(2), stop, slots=64).tokens)
    for row, n, ids in zip(tokens, length, expected["greedy"], strict=True):
        np.testing.assert_array_equal(row[n : n + 12], ids)


# What a GGUF file has no key for: llama.cpp takes it from the architecture.
UNSAID = {
    "gemma2": {"attention_scale": 8**-0.5},
    "gemma3": {"attention_scale": 8**-0.5, "full_layers": (), "local_rope_theta": 10000.0},
}
# llama.cpp's names have no place for them: other ways of YaRN and GELU, and GPT-NeoX's activation.
HUGGINGFACE_ONLY = ("llama-yarn-mscale", "llama-llama3", "phi3-longrope-past", "gpt_neox-serial")


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f.name not in HUGGINGFACE_ONLY], ids=named)
def test_a_gguf_file_holds_the_same_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    expected = checkpoint.read(folder)
    found = checkpoint.read(gguf_families.convert(folder, tmp_path / "m.gguf"))
    unsaid = UNSAID.get(folder.name, {}) | {"rope_scaling": found.config.rope_scaling}
    assert found.config == dataclasses.replace(expected.config, **unsaid)
    np.testing.assert_allclose(rotary_frequencies(found.config), rotary_frequencies(expected.config), rtol=1e-6)
    assert found.sources.keys() == expected.sources.keys()
    for name, source in expected.sources.items():
        rows = source.shape[0]
        np.testing.assert_array_equal(found.sources[name].read(0, rows), source.read(0, rows), err_msg=name)


def can_be_saved(folder: Path) -> bool:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return HUGGINGFACE[kind].fields is not None


@pytest.mark.parametrize("folder", list(filter(can_be_saved, FOLDERS)), ids=named)
def test_what_can_be_saved_is_the_same_when_read(folder: Path, tmp_path: Path) -> None:
    params = checkpoint.load(folder)
    checkpoint.save(params, tmp_path / "saved", form="huggingface")
    kinds = [json.loads((at / "config.json").read_text())["model_type"] for at in (folder, tmp_path / "saved")]
    assert kinds[0] == kinds[1]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(tmp_path / "saved"), params)


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "phi3-longrope"])
def test_what_no_folder_can_hold_is_refused(name: str, tmp_path: Path) -> None:
    params = checkpoint.load(FOLDERS[0].with_name(name))
    with pytest.raises(CheckpointError, match=r"a Hugging Face folder of type \w+ cannot hold"):
        checkpoint.save(params, tmp_path / "saved", form="huggingface")


def test_a_norm_over_all_heads_is_not_divided() -> None:
    config = checkpoint.read(FOLDERS[0].with_name("olmo2")).config
    with pytest.raises(ValueError, match="a norm over all heads"):
        mesh.local_config(config, 3)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**100),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.data(), st.sampled_from(FOLDERS))
def test_no_config_json_fails_in_another_way(data: st.DataObject, folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    tables = [fields, fields["rope_parameters"]]
    for table in tables:
        table |= data.draw(st.dictionaries(st.sampled_from(sorted(table)), ANYTHING, max_size=3))
    with contextlib.suppress(CheckpointError):
        huggingface_config.parse(fields, "here")


@settings(deadline=None)
@given(st.data(), st.sampled_from(FOLDERS))
def test_no_keys_of_gguf_fail_in_another_way(data: st.DataObject, folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    kind = gguf_families.architecture(fields)
    keys = {key.removeprefix(f"{kind}."): x for key, x in gguf_families.keys(kind, fields).items()}
    arrays = st.lists(st.integers(0, 9), max_size=3).map(np.array)
    keys |= data.draw(st.dictionaries(st.sampled_from(sorted(keys)), ANYTHING | arrays, min_size=1, max_size=3))
    with contextlib.suppress(ConfigError):
        config_of(GGUF[kind].config, Fields(keys, "here", f"{kind}."), strict=True)
