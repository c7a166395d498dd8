"""Runs small models on meshes of eight CPU devices and prints what came out as JSON: `test_sharding.py` looks at it.

A process has the devices that it began with, so this is one of its own: `python tests/meshes.py` with XLA_FLAGS=EIGHT.
"""

import dataclasses
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hf
import jax
import numpy as np
import oracle
import tiny
from jax.sharding import Mesh

from jllama import checkpoint, programs
from jllama import mesh as meshes
from jllama.checkpoint.build import build_params
from jllama.checkpoint.source import Source
from jllama.config import Config
from jllama.grammar import Grammars
from jllama.model import Params, init_cache, prefill, step
from jllama.pool import Pool
from jllama.response_format import Format
from jllama.runner import Runner
from jllama.sampling import argmax
from jllama.settings import Settings
from jllama.speculator import Speculate, choose
from jllama.tensors import fitted

# XLA_FLAGS: the same operations, compiled to slower machine code in half of the time; and eight devices.
FASTER = "--xla_backend_optimization_level=0"
EIGHT = f"{FASTER} --xla_force_host_platform_device_count=8"
ROWS, PROMPT, NEW = 8, 6, 8

# name: config, tied, tensors that only some models have
LLAMAS: dict[str, tuple[Config, bool, bool]] = {
    "mha": (*tiny.CONFIGS["mha"], False),
    "gqa": (*tiny.CONFIGS["gqa"], False),
    "wide": (Config(64, 128, 2, 4, 2, 97, 64, head_dim=32), False, False),  # parts of whole groups
    "qwen3": (Config(48, 80, 2, 8, 4, 96, 64, head_dim=8), True, True),  # biases, norms of heads
}
LLAMAS["experts"] = (
    Config(48, 40, 2, 8, 4, 96, 64, n_experts=5, n_active_experts=2, normalized_experts=True, shared_dim=24),
    *(True, False),
)
CASES = {
    "gqa float32": ["data:8", "model:8", "data:2,model:4"],  # 2 key heads: several devices have the same one
    "wide int8": ["data:4", "model:4", "data:2,model:4"],
    "qwen3 float32": ["data:2,model:2"],
    "experts float32": ["data:2,model:4"],
    "gpt2 float32": ["data:4", "model:4", "data:2,model:2"],
}


def mesh_of(text: str) -> Mesh:
    """Make a mesh of some of the devices; `mesh.make_mesh` takes all."""
    shape = meshes.parse(text)
    return Mesh(np.array(jax.devices()[: shape.data * shape.model]).reshape(shape), meshes.Shape._fields)


def llama_weights(name: str) -> oracle.Weights:
    config, tied, extras = LLAMAS[name]
    weights = oracle.random_weights(config, tied=tied)
    rng = np.random.default_rng(5)
    for i in range(config.n_layers if extras else 0):
        at = f"layers.{i}.attention"
        for kind, width in (("wq", config.q_dim), ("wk", config.kv_dim), ("wv", config.kv_dim), ("wo", config.dim)):
            weights[f"{at}.{kind}.bias"] = rng.normal(0, 0.2, width).astype(np.float32)
        for kind in ("q_norm", "k_norm"):
            weights[f"{at}.{kind}.weight"] = 1 + rng.normal(0, 0.1, config.head_dim).astype(np.float32)
    return weights


def load(name: str, dtype: str, mesh: Mesh | None, folder: Path) -> Params:
    if name == "gpt2":
        return checkpoint.load(folder, dtype=dtype, mesh=mesh)
    sources = {n: Source(a.shape, lambda start, stop, a=a: a[start:stop]) for n, a in llama_weights(name).items()}
    return build_params(fitted(LLAMAS[name][0], sources), sources, dtype=dtype, origin="test", mesh=mesh)


def greedy(params: Params, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the most probable tokens `[B, NEW]` after prompts, and the logits `[B, NEW, V]` that they are of."""
    logits, cache = prefill(params, init_cache(params, tokens.shape[0], PROMPT + NEW), tokens, length)

    def body(carry: Any, _: None) -> Any:
        logits, cache, pos = carry
        token = argmax(logits)
        following, cache = step(params, cache, token, pos)
        return (following, cache, pos + 1), (token, logits)

    _, (ids, found) = jax.lax.scan(body, (logits, cache, length), length=NEW)
    return ids.T, found.swapaxes(0, 1)


def expected(name: str, folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the oracle's logits after each of the last NEW tokens but one."""
    if name == "gpt2":
        weights = oracle.random_gpt2(32, 64, 2, vocab_size=50, context=32)
        logits = oracle.forward_gpt2(weights, 4, 1e-5, tokens)
    else:
        logits = oracle.forward(llama_weights(name), LLAMAS[name][0], tokens)
    return logits[-NEW - 1 : -1]


def compare(case: str, folder: Path) -> dict[str, Any]:
    """Run one model on a single device and on meshes."""
    name, dtype = case.split()
    tokens = np.random.default_rng(1).integers(3, 50, (ROWS, PROMPT), dtype=np.int32)
    length = np.array([PROMPT, 1, 3, 2, 4, 5, PROMPT, 1], np.int32)
    ids, logits = map(np.asarray, jax.jit(greedy)(load(name, dtype, None, folder), tokens, length))
    result = {}
    for text in CASES[case]:
        mesh = mesh_of(text)
        params = load(name, dtype, mesh, folder)
        rows = meshes.ROWS
        run = programs.over(mesh, greedy, (meshes.specs(params), rows, rows), (rows, rows))
        arguments = (params, *meshes.put(mesh, (tokens, length), rows))
        program = run.lower(*arguments).compile()
        found_ids, found = map(np.asarray, program(*arguments))
        errors = np.abs(found - logits).max(axis=(1, 2))
        wanted = [expected(name, folder, np.array([*t[:n], *i])) for t, n, i in zip(tokens, length, ids, strict=True)]
        result[text] = {
            "same ids": (found_ids == ids).all().item(),
            "collectives": collectives(program.as_text()),
            "errors": errors.tolist(),
            "oracle": np.abs(found - wanted).max().item(),
        }
    return result


def collectives(text: str) -> dict[str, int]:
    """Count the operations of a compiled program that move data between devices, by kind and shape."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
    found = re.findall(rf" = (.*?) (?:{kinds})(?:-start)?\(", text)
    assert len(found) == len(re.findall(rf" (?:{kinds})(?:-start)?\(", text))
    names = re.findall(rf" ({kinds})(?:-start)?\(", text)
    shapes = [re.sub(r"\{[^}]*\}", "", shape) for shape in found]
    return dict(Counter(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True)))


def batch(
    name: str, dtype: str, text: str | None, steps: int, speculate: Speculate = "off", more: int = 0
) -> dict[str, Any]:
    """Generate as a user does, in a batch of ragged prompts: greedily, drawn with a seed, and letters alone."""
    params = load(name, dtype, None if text is None else mesh_of(text), Path())
    letters = tiny.Letters([bytes([i + 30]) for i in range(params.config.vocab_size)])
    runner = Runner(params, grammars=Grammars(letters, letters.vocab_size))
    runner.speculator = choose(speculate, params)
    prompts = [tiny.ids(params.config, n, seed=n).tolist() for n in (1, 5, 12, 7, 3)]
    settings = [Settings(temperature=0.0 if i % 2 else 0.8, seed=i, max_new_tokens=5 + i + more) for i in range(5)]
    if more:  # few different tokens, so that they repeat themselves
        settings = [dataclasses.replace(one, logit_bias={5: 100.0, 6: 100.0, 7: 100.0}) for one in settings]
    else:  # beside a grammar nothing is guessed
        settings[3] = dataclasses.replace(settings[3], response_format=Format("regex", "[A-M]*"))
    pool = Pool(runner, [2], 5)
    rows = pool.join(list(zip(prompts, settings, strict=True))).finish()
    while not all(row.done for row in rows):
        pool.advance(steps)
    ids = [pool.take(row)[0] for row in rows]
    assert pool._state is not None
    cache = pool._state.cache.k[0]
    programs = list(runner._programs._compiled.values())  # start, read_prompt, decode
    loop = programs[-1]
    return {
        "ids": ids,
        "guesses": runner.timings.guesses,
        "collectives": [collectives(program.as_text()) for program in programs],
        "cache": [cache.shape, cache.addressable_shards[0].data.shape],
        "copies": len(
            re.findall(
                rf"= f32\[{','.join(map(str, cache.addressable_shards[0].data.shape))}\]\S* copy\(", loop.as_text()
            )
        ),
        "reused": loop.memory_analysis().alias_size_in_bytes,
    }


def shards() -> dict[str, Any]:
    """Say what each device holds of each leaf, as a fraction of the single device's."""
    one, many = (load("wide", "int8", mesh, Path()) for mesh in (None, mesh_of("data:2,model:4")))
    found = {}
    for (path, whole), leaf in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(many), strict=True):
        parts = {whole.nbytes / shard.data.nbytes for shard in leaf.addressable_shards}
        found[jax.tree_util.keystr(path)] = [*parts, len(leaf.addressable_shards)]
    return found


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    with tempfile.TemporaryDirectory() as name:
        weights = oracle.random_gpt2(32, 64, 2, vocab_size=50, context=32)
        folder = hf.write_folder(Path(name) / "gpt2", hf.gpt2_config(32, 64, 2, 4, 50, 32), weights)
        result = {"cases": {case: compare(case, folder) for case in CASES}, "shards": shards()}
    result["batches"] = [batch("gqa", "float32", text, steps) for text, steps in ((None, 99), ("data:2,model:4", 3))]
    result["guessed"] = [
        batch("gqa", "float32", text, 9, how, more=40) for text, how in ((None, "off"), ("data:2,model:4", "lookup"))
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
