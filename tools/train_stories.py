"""Makes the embedded model from nothing: `python tools/train_stories.py --work=DIR --writer=stories260K.bin`.

Each stage leaves its result in the work folder and is passed over when that is there, so a run that was broken off
goes on where it was; the seeds are fixed. In this order:

  write      the writer, another model, writes stories from random openings
  clean      drops broken and doubled stories, and holds some back for evaluation
  tokenize   trains a SentencePiece tokenizer on the stories, and encodes them
  train      trains a Llama on the ids: a loss and an optimiser around `jllama.decode.score`
  export     writes the model as llama2.c files
  evaluate   bits a byte of held-out text, beside the writer's; sample stories; the training curve

The results are `WORK/int8` and `WORK/float32` (a model and its tokenizer each), and `WORK/report.md`, `curve.png`.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import random
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sentencepiece
from absl import app, flags
from optax.contrib import MuonDimensionNumbers, muon
from tqdm import tqdm

from jllama import LLM, Prompt, Settings, checkpoint, decode
from jllama.checkpoint.files import replacing
from jllama.config import Config
from jllama.model import Params

FLAGS = flags.FLAGS
flags.DEFINE_string("work", None, "the folder of everything that a run leaves behind", required=True)
flags.DEFINE_string("writer", None, "checkpoint of the model that writes the stories", required=True)
flags.DEFINE_string("text", None, "a text for evaluation; stories that share a passage with it are dropped")
flags.DEFINE_bool("smoke", False, "every stage, but tiny: about a minute, and a model that can say nothing")


class Sizes(NamedTuple):
    """How much of everything a run makes."""

    files: int = 64  # of stories
    stories: int = 1024  # in a file
    config: Config = Config(
        dim=192, hidden_dim=512, n_layers=5, n_heads=3, n_kv_heads=1, vocab_size=1536, max_seq_len=384
    )
    batch: int = 12
    steps: int = 4200
    noise: float = 0.005  # of the ids in training are replaced by random ones
    look: int = 100  # steps between two looks at the held-out stories, and two savings


SMOKE = Sizes(2, 64, Config(64, 128, 2, 4, 1, 384, 64), 4, 20, look=10)

BOS = 1  # in every tokenizer that SentencePiece trains

WORDS = {
    slot: text.split() for slot, text in tomllib.loads(Path(__file__).with_name("story_words.toml").read_text()).items()
}
OPENINGS = (
    "Once upon a time, there was a {trait} {hero}",
    "Once upon a time, there was a {trait} {hero} named {name}.",
    "Once upon a time, there was a {trait} {thing}",
    "Once upon a time, in a {trait} {place}, there was a {hero}",
    "Once there was a {hero} who liked to {action}",
    "There was a {trait} {hero} called {name}.",
    "One day, a {trait} {hero} named {name}",
    "One day, {name} and {other} went to the {place}.",
    "One day, {name} found a {trait} {thing}",
    "{name} was a {trait} {hero}. {name} wanted to {action}",
    "{name} had a {trait} {thing}.",
    "{name} and {other} like to {action}",
    "The {trait} {hero}",
    "The {hero} wanted to {action} the {thing}",
)


def opening(rng: random.Random) -> str:
    """Make up how a story begins; half of them are left to the writer."""
    if rng.random() < 0.5:
        return ""
    name, other = rng.sample(WORDS["name"], 2)
    words = {slot: rng.choice(WORDS[slot]) for slot in ("hero", "trait", "thing", "place", "action")}
    text = rng.choice(OPENINGS).format(**words, name=name, other=other)
    return re.sub(r"\ba (?=[aeiou])", "an ", text)


def write(work: Path, writer: str, sizes: Sizes) -> None:
    """Write files of stories, one process a processor: a small model doesn't keep two of them busy."""
    paths = [work / f"written-{i:03}.json" for i in range(sizes.files)]
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(write_file, path, writer, sizes.stories, i) for i, path in enumerate(paths) if not path.exists()
        ]
        for job in tqdm(as_completed(jobs), desc="write", unit=" files", total=len(jobs)):
            job.result()


def write_file(path: Path, writer: str, count: int, seed: int) -> None:
    """Write a file of stories: of `count`, those that come to an end within the writer's context."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        text = opening(rng)
        settings = Settings(max_new_tokens=2**20, temperature=1.0, top_p=1.0, seed=rng.getrandbits(64))
        prompts.append(Prompt(text, settings))
    stories = loaded(writer).complete(prompts, batch_size=64)
    dump(path, [s.prompt + s.text for s in stories if s.finish_reason == "stop"])


@cache
def loaded(checkpoint: str) -> LLM:
    """Load a model once a process."""
    return LLM.load(checkpoint)


def clean(work: Path, text: Path | None) -> None:
    """Write the stories that are whole and unlike the others: corpus.json, and every 50th to held_out.json.

    A blank line stands between their paragraphs.
    """
    stories = [s for path in sorted(work.glob("written-*.json")) for s in json.loads(path.read_text())]
    stories = [re.sub(r" *\n\s*", "\n\n", re.sub(r"[ \t]+", " ", story)).strip() for story in stories]
    passages = set(shingles(text.read_text())) if text else set()
    dropped: Counter[str] = Counter()
    kept, seen = [], set()
    for story in stories:
        sentences = re.split(r"(?<=[.!?\"])\s+", story)
        if not re.fullmatch(r"[ -~\n]{200,}[.!?\"]", story) or story.count('"') % 2:
            dropped["broken"] += 1
        elif sum(s in seen for s in sentences) > len(sentences) / 2 or len(set(sentences)) < 0.8 * len(sentences):
            dropped["doubled"] += 1
        elif not passages.isdisjoint(shingles(story)):
            dropped["in the text for evaluation"] += 1
        else:
            kept.append(story)
            seen.update(sentences)
    counted = f"kept {len(kept)} stories, {sum(map(len, kept))} characters; dropped {dict(dropped)}"
    print(f"clean: {counted}", file=sys.stderr)
    dump(work / "held_out.json", kept[::50])
    dump(work / "corpus.json", [story for i, story in enumerate(kept) if i % 50])


def shingles(text: str) -> Iterator[str]:
    """Yield every passage of 80 letters."""
    letters = "".join(re.findall(r"[a-z]", text.lower()))
    return (letters[i : i + 80] for i in range(len(letters) - 79))


def tokenize(work: Path, sizes: Sizes) -> None:
    """Train the tokenizer, tokenizer.model, and encode the stories, each after a BOS."""
    corpus = json.loads((work / "corpus.json").read_text())
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for story in corpus for line in story.split("\n\n")),
        model_writer=model, model_type="bpe", vocab_size=sizes.config.vocab_size, byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=os.cpu_count(), minloglevel=1,
    )  # fmt: skip
    (work / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for name in ("held_out", "corpus"):
        stories = processor.encode(json.loads((work / f"{name}.json").read_text()), add_bos=True)
        np.save(work / f"{name}.npy", np.concatenate(stories).astype(np.int32))


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Compute the mean negative log-probability, in nats, of tokens 1 to T - 1 of `tokens` int32 `[B, T]`."""
    return -jnp.mean(decode.score(params, tokens)[0])


def optimiser(steps: int) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam for the embedding and the norms; the rate falls in the last half.

    Source: Jordan et al., Muon, kellerjordan.github.io/posts/muon.
    """

    def dimensions(params: Params) -> Any:
        """Name the axes, `[out, in]`, of the matrices that are Muon's."""
        axes = jax.tree.map(lambda leaf: MuonDimensionNumbers(1, 0) if leaf.ndim == 2 else None, params)
        return dataclasses.replace(axes, embedding=None)

    def rate(peak: float) -> optax.Schedule:
        knots = [(0, 0.0), (min(30, steps // 4), peak), (steps // 2, peak), (steps, 0.02 * peak)]
        return lambda step: jnp.interp(step, jnp.array([k for k, _ in knots]), jnp.array([v for _, v in knots]))

    return muon(rate(0.02), adam_learning_rate=rate(0.004), muon_weight_dimension_numbers=dimensions)


def train(work: Path, sizes: Sizes) -> Params:
    """Train the model; its weights, the optimiser's state and the step are in state.npz, the losses in curve.csv."""
    corpus = sequences(work / "corpus.npy", sizes.config.max_seq_len)
    held_out = sequences(work / "held_out.npy", sizes.config.max_seq_len)[: 4 * sizes.batch]
    tools = optimiser(sizes.steps)
    params = checkpoint.random(dataclasses.replace(sizes.config, tied=True))
    state = (params, tools.init(params), jnp.int32(0))
    if (work / "state.npz").exists():
        state = load_state(work / "state.npz", state)

    @jax.jit
    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, memory, n = state
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, memory = tools.update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory, n + 1), value

    look = jax.jit(loss)
    bar = tqdm(total=sizes.steps, initial=int(state[2]), desc="train", unit=" steps")
    began, values = time.perf_counter(), []
    for i in range(int(state[2]), sizes.steps):
        state, value = step(state, jnp.asarray(batch(corpus, sizes, seed=i)))
        values.append(float(value))
        bar.update()
        if (i + 1) % sizes.look == 0 or i + 1 == sizes.steps:
            validation = float(look(state[0], jnp.asarray(held_out)))
            save_state(work / "state.npz", state)
            with open(work / "curve.csv", "a") as file:
                csv.writer(file).writerow([i + 1, time.perf_counter() - began, np.mean(values), validation])
            bar.set_postfix(loss=f"{np.mean(values):.3f}", held_out=f"{validation:.3f}")
            began, values = time.perf_counter(), []
    trained: Params = state[0]
    return trained


def batch(corpus: np.ndarray, sizes: Sizes, seed: int) -> np.ndarray:
    """Draw rows, with a few ids replaced by any others: bytes that no story has must not ruin what follows them."""
    rng = np.random.default_rng(seed)
    rows: np.ndarray = corpus[rng.integers(len(corpus), size=sizes.batch)]
    replaced = rng.random(rows.shape) < sizes.noise
    replaced[:, 0] = False  # BOS
    return np.where(replaced, rng.integers(BOS + 2, sizes.config.vocab_size, rows.shape), rows).astype(np.int32)


def sequences(path: Path, width: int) -> np.ndarray:
    """Read encoded stories as rows of `width` ids: each story from its BOS on, and what follows it."""
    ids = np.load(path)
    starts = np.flatnonzero(ids[: len(ids) - width] == BOS)
    rows: np.ndarray = np.lib.stride_tricks.sliding_window_view(ids, width)[starts]
    return rows


def save_state(path: Path, state: Any) -> None:
    """Write the leaves of a pytree."""
    with replacing(path) as file:
        np.savez(file, *map(np.asarray, jax.tree.leaves(state)))


def load_state(path: Path, like: Any) -> Any:
    """Read a pytree of the structure of `like`."""
    with np.load(path) as file:
        return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(file[name]) for name in file.files])


def export(work: Path, params: Params) -> None:
    """Write the folders int8 and float32: model.bin and tokenizer.model."""
    for name, version in (("int8", 2), ("float32", 0)):
        (work / name).mkdir(exist_ok=True)
        checkpoint.save(params, work / name / "model.bin", version=version)
        (work / name / "tokenizer.model").write_bytes((work / "tokenizer.model").read_bytes())


def evaluate(work: Path, writer: str, text: Path | None) -> None:
    """Write report.md: bits a byte beside the writer's, and 20 stories; and curve.png."""
    texts = {"held-out stories": json.loads((work / "held_out.json").read_text())[:200]}
    if text is not None:
        texts[text.name] = [text.read_text()]
    models = {name: LLM.load(work / name / "model.bin") for name in ("float32", "int8")} | {"writer": LLM.load(writer)}
    lines = ["| bits a byte | " + " | ".join(texts) + " |", "|---|" + "---|" * len(texts)]
    for name, llm in models.items():
        lines.append(f"| {name} | " + " | ".join(f"{bits_per_byte(llm, parts):.4f}" for parts in texts.values()) + " |")
    settings = [Settings(max_new_tokens=2**20, temperature=0.8, top_p=0.9, seed=seed) for seed in range(20)]
    stories = models["int8"].complete((Prompt("", s) for s in settings), batch_size=20)
    for seed, story in enumerate(stories):
        lines += ["", f"**{seed}**", "", *(f"> {line}".rstrip() for line in story.text.splitlines())]
    (work / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[: 2 + len(models)]))
    plot(work)


def bits_per_byte(llm: LLM, texts: list[str]) -> float:
    """Score texts, each by itself."""
    scores = [llm.score(text) for text in texts]
    return sum(s.bits_per_byte * s.n_bytes for s in scores) / sum(s.n_bytes for s in scores)


def plot(work: Path) -> None:
    """Draw the losses of curve.csv over the steps."""
    from matplotlib.figure import Figure

    steps, _, training, held_out = np.loadtxt(work / "curve.csv", delimiter=",", ndmin=2).T
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, training, label="training", linewidth=1)
    axes.plot(steps, held_out, label="held-out stories", linewidth=1)
    axes.set(
        xlabel="step",
        ylabel="loss, nats a token",
        ylim=(min(*training, *held_out) - 0.1, min(4.0, max(held_out) + 0.1)),
    )
    axes.legend()
    figure.savefig(work / "curve.png", dpi=110)


def dump(path: Path, stories: list[str]) -> None:
    """Write stories as JSON; the file appears when it is complete."""
    with replacing(path) as file:
        file.write(json.dumps(stories, indent=0).encode())


def main(argv: list[str]) -> None:
    """Run the command line; a fault in what it is given is one line."""
    try:
        run(Path(FLAGS.work), FLAGS.writer, Path(FLAGS.text) if FLAGS.text else None, SMOKE if FLAGS.smoke else Sizes())
    except (ValueError, OSError) as e:
        sys.exit(f"train_stories: {' '.join(str(e).split())}")


def run(work: Path, writer: str, text: Path | None, sizes: Sizes) -> None:
    """Run the stages whose results aren't there."""
    if text is not None and not text.is_file():
        raise ValueError(f"--text={text}: no such file")
    work.mkdir(parents=True, exist_ok=True)
    write(work, writer, sizes)
    if not (work / "corpus.json").exists():
        clean(work, text)
    if not (work / "corpus.npy").exists():
        tokenize(work, sizes)
    export(work, train(work, sizes))
    evaluate(work, writer, text)


if __name__ == "__main__":
    app.run(main)
