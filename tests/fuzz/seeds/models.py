"""Good checkpoints of every format."""

import dataclasses
import json

import gguf_writer
import hf
import meta_writer
import numpy as np
import oracle
from gguf import GGMLQuantizationType, quants
from ml_dtypes import bfloat16

from fuzz.seeds.base import Seed, folder_of, json_bytes, seed, shared_file
from jllama import checkpoint
from jllama.config import Config
from jllama.rope import Llama3

TINY = Config(8, 16, 2, 2, 1, 16, 32)
Q_TINY = Config(32, 32, 1, 2, 1, 16, 32)


def _bin(version, tied):
    path = "model.bin"
    params = checkpoint.random(dataclasses.replace(TINY, tied=tied))
    return folder_of(lambda top: checkpoint.save(params, top / path, version=version))


@seed
def llama2c_v0():
    return [Seed(_bin(0, tied), "model.bin", {"model.bin": "header"}, "model") for tied in (True, False)]


@seed
def llama2c_v1():
    return [Seed(_bin(1, tied), "model.bin", {"model.bin": "header"}, "model") for tied in (True, False)]


@seed
def llama2c_v2():
    made = [Seed(_bin(2, tied), "model.bin", {"model.bin": "header"}, "model") for tied in (True, False)]
    real = [{"model.bin": data} for data in shared_file("stories260K/stories260K_q80.bin")]
    return [*made, *made, *made, *(Seed(files, "model.bin", {"model.bin": "header"}, "model") for files in real)]


# --- Hugging Face

HF_CONFIGS = {
    "llama": (Config(8, 16, 2, 2, 1, 16, 32), {}),
    "llama3": (Config(8, 16, 1, 2, 1, 16, 32, rope_theta=5e5, rope_scaling=Llama3(8.0, 1.0, 4.0, 16)), {}),
    "mistral": (Config(8, 16, 1, 2, 1, 16, 32, sliding_window=8), {"model_type": "mistral", "sliding_window": 8}),
}


def _hf(name, shards=1, dtype=np.float32):
    config, changes = HF_CONFIGS[name]
    weights = {n: a.astype(dtype) for n, a in oracle.random_weights(config, tied=False).items()}
    return folder_of(lambda top: hf.write_llama(top, weights, config, shards, **changes))


def _gpt2():
    weights = oracle.random_gpt2(8, 32, 1, 16, 32)
    fields = hf.gpt2_config(8, None, 1, 2, 16, 32)
    return folder_of(lambda top: hf.write_folder(top, fields, {n: a.astype(np.float32) for n, a in weights.items()}))


@seed
def config_json():
    found = [Seed(_hf(name), "", {"config.json": "json"}, "model") for name in HF_CONFIGS]
    v5 = _hf("llama3")
    fields = json.loads(v5["config.json"])
    fields["rope_parameters"] = {"rope_theta": fields.pop("rope_theta"), **fields.pop("rope_scaling")}
    fields["dtype"] = fields.pop("torch_dtype")
    v5["config.json"] = json_bytes(fields)
    return [*found, Seed(v5, "", {"config.json": "json"}, "model"), Seed(_gpt2(), "", {"config.json": "json"}, "model")]


@seed
def safetensors_file():
    files = [_hf("llama"), _hf("llama3", dtype=bfloat16), _gpt2()]
    return [Seed(f, "", {"model.safetensors": "safetensors"}, "model") for f in files]


@seed
def safetensors_index():
    files = _hf("llama", 3)
    return [
        Seed(files, "", {"model.safetensors.index.json": "json"}, "model"),
        Seed(files, "", {"model-00002-of-00003.safetensors": "safetensors"}, "model"),
    ]


# --- Meta

META = Config(8, 32, 1, 2, 2, 16, 4096, norm_eps=1e-5)


def _meta(n=1, npy=False):
    weights = oracle.random_weights(META, tied=False)
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "multiple_of": 32}

    def write(top):
        meta_writer.write(top, weights, n, **sizes)
        if npy:
            for i in range(n):
                (top / f"consolidated.{i:02}.pth").unlink()
            for name, array in weights.items():
                np.save(top / f"{name}.npy", array)

    return folder_of(write)


@seed
def meta_params_json():
    return [Seed(_meta(n), "", {"params.json": "json"}, "model") for n in (1, 2)]


@seed
def meta_pth():
    return [
        Seed(_meta(1), "", {"consolidated.00.pth": "pth"}, "model"),
        Seed(_meta(2), "", {"consolidated.01.pth": "pth"}, "model"),
    ]


@seed
def meta_npy():
    names = ("layers.0.attention.wq.weight.npy", "norm.weight.npy")
    return [Seed(_meta(1, npy=True), "", {name: "npy"}, "model") for name in names]


# --- GGUF


def _gguf_keys(config, architecture="llama", **more):
    keys = {"general.architecture": architecture, "general.alignment": 32}
    sizes = {
        "block_count": config.n_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.dim,
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": 1e4,
        "expert_count": 0,
        "vocab_size": config.vocab_size,
    }
    return keys | {f"{architecture}.{k}": v for k, v in sizes.items()} | more


def _gguf(config, architecture="llama", quantised=None, divisors=False):
    weights = gguf_writer.renamed(oracle.random_weights(config, tied=True))
    tensors = {}
    for name, array in weights.items():
        if quantised is not None and array.ndim == 2:
            data = quants.quantize(array.astype(np.float32), GGMLQuantizationType(quantised))
            tensors[name] = array.shape, quantised, data.tobytes()
        else:
            tensors[name] = gguf_writer.plain(array.astype(np.float32))
    if divisors:
        tensors["rope_freqs.weight"] = gguf_writer.plain(np.ones(config.head_dim // 2, np.float32))
    return {"m.gguf": gguf_writer.gguf_bytes(_gguf_keys(config, architecture), tensors)}


@seed
def gguf_model():
    files = [
        _gguf(TINY, divisors=True),
        _gguf(TINY, "qwen2"),
        _gguf(Q_TINY, quantised=8),
        _gguf(Q_TINY, quantised=2),
        _gguf(Q_TINY, quantised=3),
    ]
    return [Seed(f, "m.gguf", {"m.gguf": "gguf"}, "model") for f in files]
