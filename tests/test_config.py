"""`Config`'s checks, and every `configs/*.toml` against the published sizes."""

import dataclasses
import math
from pathlib import Path

import pytest

from jllama.checkpoint import llama2c
from jllama.config import Config, ConfigError, from_toml, with_context
from jllama.rope import Linear, Llama3, LongRope
from jllama.tensors import tensors

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

PARAMETERS = {
    "smollm2_135m": 134_515_008,
    "tinyllama_1.1b": 1_100_048_384,
    "llama3.2_1b": 1_235_814_400,
    "llama2_7b": 6_738_415_616,
    "llama3.1_8b": 8_030_261_248,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
}
FILE_SIZES = {"stories260K": 1_056_540, "stories15M": 60_816_028, "stories42M": 167_020_572, "stories110M": 438_381_596}
GOOD = Config(dim=64, hidden_dim=172, n_layers=5, n_heads=8, n_kv_heads=4, vocab_size=512, max_seq_len=512)


def test_every_config_has_a_published_size() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == PARAMETERS.keys() | FILE_SIZES.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    config = from_toml(CONFIGS / f"{name}.toml")
    counts = [math.prod(tensor.shape) * len(tensor.names(config)) for tensor in tensors(config)]
    assert sum(counts) == PARAMETERS[name]


@pytest.mark.parametrize("name", FILE_SIZES)
def test_file_size_is_the_published_one(name: str) -> None:
    config = from_toml(CONFIGS / f"{name}.toml")
    assert llama2c.file_size(llama2c.Header(0, config)) == FILE_SIZES[name]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_first_line_names_the_source(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_rope_scaling_is_read() -> None:
    config = from_toml(CONFIGS / "llama3.2_1b.toml")
    assert config.tied
    assert config.rope_scaling == Llama3(32.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_heads": 7, "n_kv_heads": 2, "dim": 56}, ["n_heads = 7", "n_kv_heads = 2"]),
        ({"n_kv_heads": 0}, ["n_kv_heads = 0"]),
        ({"n_kv_heads": 16}, ["n_kv_heads = 16"]),
        ({"dim": 65}, ["dim = 65", "n_heads = 8", "head_dim"]),
        ({"dim": 56}, ["head_dim = 7"]),
        ({"head_dim": 5}, ["head_dim = 5"]),
        ({"head_dim": -8}, ["head_dim = -8"]),
        ({"n_layers": 0}, ["n_layers = 0"]),
        ({"max_seq_len": 0}, ["max_seq_len = 0"]),
        ({"vocab_size": 0}, ["vocab_size = 0"]),
        ({"vocab_size": -512}, ["vocab_size = -512"]),
        ({"hidden_dim": -1, "n_layers": -2}, ["hidden_dim = -1", "n_layers = -2"]),
        ({"rope_theta": 0.0}, ["rope_theta = 0.0"]),
        ({"norm_eps": math.nan}, ["norm_eps = nan"]),
        (
            {"n_heads": 3, "n_kv_heads": 2, "norm_eps": -1.0, "rope_theta": math.inf},
            ["n_kv_heads = 2", "dim = 64", "norm_eps = -1.0", "rope_theta = inf"],
        ),
    ],
)
def test_bad_sizes_are_all_named(changes: dict[str, float], words: list[str]) -> None:
    fields = {f.name: getattr(GOOD, f.name) for f in dataclasses.fields(GOOD)} | {"head_dim": 0} | changes
    with pytest.raises(ConfigError) as e:
        Config(**fields)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_head_dim_may_differ_from_dim_over_heads() -> None:
    config = Config(1792, 4864, 1, n_heads=24, n_kv_heads=8, vocab_size=10, max_seq_len=8, head_dim=128)
    shapes = {tensor.name: tensor.shape for tensor in tensors(config)}
    assert shapes["layers.{}.attention.wq.weight"] == (3072, 1792)
    assert shapes["layers.{}.attention.wk.weight"] == (1024, 1792)
    assert shapes["layers.{}.attention.wo.weight"] == (1792, 3072)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("dim = 64\n", ""), "dim"),
        (("dim = 64", "dims = 64"), "dims"),
        (("dim = 64", "dim = 0"), "dim = 0"),
        (("dim = 64", "dim = "), "TOML"),
        (("dim = 64", "dim = " + "[" * 5000), "TOML"),
        (("dim = 64", "dim" + ".a" * 10000 + " = 64"), "expected at most 8192"),
        (("dim = 64", "dim = " + "9" * 5000), "TOML"),
        (("dim = 64", "dim = 1" + "0" * 400), "dim = 1000"),
        (("norm_eps = 1e-5", "norm_eps = 1" + "0" * 400), "norm_eps = 1000"),
        (("dim = 64", 'dim = "\\u001b[2J"'), "dim = '.x1b"),
        (("tied = true", "[rope_scaling]\nfactor = 8.0"), "low_freq_factor"),
    ],
)
def test_bad_toml_names_the_file_and_the_field(tmp_path: Path, change: tuple[str, str], word: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text((CONFIGS / "stories260K.toml").read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    with pytest.raises(ConfigError, match=word) as e:
        from_toml(path)
    assert str(path) in str(e.value)


def test_absent_toml_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        from_toml(tmp_path / "absent.toml")


def test_layers_of_their_own_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    text = "dim = 8\nhidden_dim = 8\nn_layers = 4\nn_heads = 1\nn_kv_heads = 1\nvocab_size = 8\nmax_seq_len = 8\n"
    path.write_text(f"{text}sliding_window = 4\nfull_layers = [1, 3]\n[rope_scaling]\ntype = 'linear'\nfactor = 2.0\n")
    config = from_toml(path)
    assert (config.full_layers, config.has_equal_layers, hash(config) != 0) == ((1, 3), False, True)
    assert config.rope_scaling == Linear(2.0)
    path.write_text(f"{text}[rope_scaling]\ntype = 'ntk'\n")
    with pytest.raises(ConfigError, match=r"rope_scaling.type = 'ntk': expected linear or llama3"):
        from_toml(path)


def test_a_context_is_at_most_the_models_and_chooses_the_factors_of_longrope() -> None:
    config = Config(32, 64, 2, 4, 4, 97, 64)
    assert with_context(config, 10) == dataclasses.replace(config, max_seq_len=10)
    scaling = LongRope((1.0, 2.0), (3.0, 4.0), 16, 64)
    config = Config(32, 64, 2, 4, 4, 97, 16, head_dim=4, rope_scaling=scaling)
    assert with_context(config, 16).rope_scaling == scaling
    long = with_context(config, 17)
    assert (long.max_seq_len, long.rope_scaling) == (17, dataclasses.replace(scaling, is_long=True))
    assert with_context(long, 16) == config
    for context in (0, 65):
        with pytest.raises(ConfigError, match=f"context = {context}: expected 1 to 64 tokens"):
            with_context(config, context)
    with pytest.raises(ConfigError, match="context = 8: expected 64 to 64 tokens"):
        with_context(Config(32, 64, 2, 4, 4, 97, 64, position="learned"), 8)
    with pytest.raises(ConfigError, match=r"rope_scaling.long = -1.*; rope_scaling has 2 short and 1 long factors"):
        dataclasses.replace(config, rope_scaling=LongRope((1.0, 2.0), (-1.0,), 16, 64))
