"""What is done with a damaged folder, and how the result is judged.

Allowed: success with sizes that the files can hold, or one of the project's own errors with a message that fits a
terminal. `judge` names everything else.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import math
import random
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fuzz.seeds.texts import RESULT_PROMPTS
from fuzz.seeds.tokenizers import bytelevel, ranks
from jllama import chat, checkpoint, config, prompts, results, tokenizer
from jllama.chat import ChatError, Conversation
from jllama.errors import InputError
from jllama.settings import Settings, to_sampling
from jllama.tokenizer import TokenizerError, tiktoken

PACKAGE = str(Path(checkpoint.__file__).parent.parent)
TEXTS = ["", "a", "the cat  é\n<|end|></s>", "<s>[INST] x\x00\ufeff🦙", "a" * 300]
MESSAGES = [
    [{"role": "user", "content": " Hi <|im_end|> there "}],
    [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": ""},
    ],
]
MOST_NUMBERS = 1 << 26  # that a model is loaded with here
PER_BYTE = 8  # numbers that a byte of a file can stand for, at most
LONGEST_MESSAGE = 1000


class Odd(Exception):
    """Accepted, but it should not have been."""


class Hang(BaseException):
    """Raised by the alarm of a case."""


# --- what is done with a folder; each returns a word about what was accepted


def model(path: Path, rng: random.Random, size: int) -> str:
    contents = checkpoint.read(path)
    numbers = sum(math.prod(s.shape) for s in contents.sources.values())
    if numbers > PER_BYTE * size + 1024:
        raise Odd(f"{numbers} numbers from {size} bytes: {contents.config}")
    if numbers <= MOST_NUMBERS:
        checkpoint.load(path, dtype=rng.choice(["auto", "float32", "bfloat16", "int8"]))
    c = contents.config
    return f"{c.dim},{c.hidden_dim},{c.n_layers},{c.n_heads},{c.n_kv_heads},{c.vocab_size},{c.max_seq_len},{c.head_dim}"


def tokens(path: Path, rng: random.Random, size: int) -> str:
    tok = tokenizer.load(path)
    # As the runner does.
    np.array(tok.stop_ids, np.int32)
    for text in TEXTS:
        for encode in (tok.encode, tok.prompt_ids, lambda t: tok.encode_template(tok.guard(t))):
            try:
                ids = encode(text)
            except TokenizerError:
                continue
            if not all(type(i) is int for i in ids):
                raise Odd(f"ids {ids[:9]}")
            if any(not 0 <= i < tok.vocab_size for i in ids if i not in (tok.bos, tok.eos)):
                raise Odd(f"ids {ids[:9]} of a vocabulary of {tok.vocab_size}")
            tok.decode(i for i in ids if 0 <= i < tok.vocab_size)
    some = [*range(min(tok.vocab_size, 300)), tok.vocab_size - 1]
    tok.decode(some)
    if len(tok.decode([some[0]] * 2)) > 4 * size + 64:
        raise Odd("a piece longer than the file")
    return str(tok.vocab_size)


_FEW = len(ranks())


def few_tokens(path: Path, rng: random.Random, size: int) -> str:
    tiktoken._N_TOKENS = _FEW
    return tokens(path, rng, size)


_TOKENIZER: list = []


def _tokenizer(folder: Path):
    if not _TOKENIZER:
        spec = bytelevel()
        (folder.parent / "chat-tokenizer").mkdir(exist_ok=True)
        file = folder.parent / "chat-tokenizer" / "tokenizer.json"
        file.write_text(json.dumps(spec))
        (file.parent / "tokenizer_config.json").write_text('{"bos_token": "<|begin|>", "eos_token": "<|end|>"}')
        _TOKENIZER.append(tokenizer.load(file))
    return _TOKENIZER[0]


def template(path: Path, rng: random.Random, size: int) -> str:
    tok = _tokenizer(path if path.is_dir() else path.parent)
    found = chat.find_template(path, tok)
    rendered = 0
    for messages in MESSAGES:
        try:
            rendered += len(found.render(messages))
        except (ChatError, TokenizerError) as e:
            judge_message(e)
    with contextlib.suppress(ChatError, TokenizerError):
        Conversation(found, "s").ask("q", 4096)
    return "rendered" if rendered else "refuses"


def toml(path: Path, rng: random.Random, size: int) -> str:
    hash(config.from_toml(path))
    return "config"


def prompt_file(path: Path, rng: random.Random, size: int) -> str:
    tok = _tokenizer(path.parent)
    read = list(prompts.read(str(path), Settings(), lambda p: tok.prompt_ids(p.text)))
    if read:
        to_sampling([request.prompt.settings for request in read])
    return "prompts"


def result_file(path: Path, rng: random.Random, size: int) -> str:
    wanted = [prompts.Request(prompts.Prompt(p)) for p in RESULT_PROMPTS]
    before = path.read_bytes()
    n = results.count(path, iter(wanted), ("prompt", "text", "tokens", "finish_reason"))
    after = path.read_bytes()
    if not before.startswith(after) or after.count(b"\n") != n or (after and not after.endswith(b"\n")):
        raise Odd(f"{n} results counted, {len(before)} bytes became {len(after)}")
    return str(n)


RUNS: dict[str, Callable[[Path, random.Random, int], str]] = {
    "model": model,
    "tokenizer": tokens,
    "tiktoken": few_tokens,
    "chat": template,
    "toml": toml,
    "prompts": prompt_file,
    "results": result_file,
}


# --- the verdict


class Verdict(NamedTuple):
    """How a case ended: `kind` is "ok", "refused", or what is wrong; `place` tells findings apart."""

    kind: str
    place: str = ""
    message: str = ""


def judge_message(e: BaseException) -> None:
    """Raise `Odd` for a message that does more to a terminal than to be read, or fills it."""
    text = str(e)
    if len(text) > LONGEST_MESSAGE:
        raise Odd(f"an error message of more than {LONGEST_MESSAGE} characters") from e
    if bad := [c for c in text if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]:
        raise Odd(f"an error message with control characters {''.join(bad[:5])!a}") from e


def _frames(e: BaseException) -> tuple[str, str, str]:
    """The innermost line in jllama, its source, and the innermost place of all."""
    frames = traceback.extract_tb(e.__traceback__)
    inside = [f for f in frames if f.filename.startswith(PACKAGE)]
    last, deepest = (inside or frames)[-1], frames[-1]
    where = (
        f"{Path(last.filename).relative_to(PACKAGE) if inside else Path(last.filename).name}:{last.lineno} {last.name}"
    )
    outside = "" if deepest is last else f" > {Path(deepest.filename).name} {deepest.name}"
    return where, linecache.getline(last.filename, last.lineno or 0).strip(), outside


def run(name: str, path: Path, rng: random.Random, size: int, *, cut: bool, whole: bool) -> Verdict:
    """Run a case. `cut`: the file is a beginning of the good one; `whole`: then it must be refused."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            word = RUNS[name](path, rng, size)
        if cut and whole:
            return Verdict("accepted though cut short", name, word)
        if caught:
            w = caught[0]
            return Verdict(
                "warning", f"{Path(w.filename).name}:{w.lineno}", f"{w.category.__name__}: {w.message}"[:300]
            )
        return Verdict("ok", "", word)
    except Odd as e:
        cause = e.__cause__ or e
        where, _, outside = _frames(cause)
        return Verdict(
            "odd",
            f"{where}{outside}: {str(e)[:60] if e.__cause__ else str(e).split(' ')[1:3]}",
            f"{e}; {ascii(str(cause))[:200]}",
        )
    except Hang as e:
        where, _, outside = _frames(e)
        return Verdict("hang", f"{where}{outside}")
    except MemoryError as e:
        where, _, outside = _frames(e)
        return Verdict("MemoryError", f"{where}{outside}", ascii(str(e))[:200])
    except BaseException as e:
        kind = f"{type(e).__module__}.{type(e).__name__}".removeprefix("builtins.")
        where, source, outside = _frames(e)
        own = (
            isinstance(e, InputError)
            or (type(e) is ValueError and not outside and source.startswith(("raise ", "problems")))
            or (type(e) in (FileNotFoundError, IsADirectoryError, PermissionError, OSError))
        )
        if not own:
            return Verdict(kind, f"{where}{outside}", ascii(str(e))[:300])
        try:
            judge_message(e)
        except Odd as odd:
            return Verdict("message", f"{where}: {str(odd)[:50]}", ascii(str(e))[:300])
        return Verdict("refused", type(e).__name__)
