"""Incremental decoding and stop strings, on a made-up tokenizer of a few pieces."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.text import StopStrings, StreamDecoder

WORDS = (b"", b" Hello", b" world", b"  ", b"a")


class Toy:
    """Ids 0..255 are bytes, those above are `WORDS`; BOS is 256, and only what follows it loses a space."""

    def piece(self, token: int, *, first: bool) -> bytes:
        if token < 256:
            return bytes([token])
        return WORDS[token - 256].removeprefix(b" " if first else b"")

    def first_after(self, token: int, *, first: bool) -> bool:
        return token == 256


BOS, HELLO, WORLD = 256, 257, 258


def stream(ids, prompt=()):
    decoder = StreamDecoder(Toy(), prompt)
    return [*map(decoder.feed, ids), decoder.flush()]


def stop(parts, stops):
    """All that comes out of `StopStrings`, and whether it stopped."""
    strings, out = StopStrings(stops), ""
    for part in parts:
        text, stopped = strings.feed(part)
        out += text
        if stopped:
            return out, True
    return out + strings.flush()[0], False


def cut(text, at):
    """The parts of `text` between the positions `at`."""
    edges = [0, *sorted(min(i, len(text)) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def test_a_character_over_several_tokens_comes_out_whole():
    assert stream([HELLO, *"🦙".encode(), WORLD]) == ["Hello", "", "", "", "🦙", " world", ""]


def test_a_character_cut_short_is_one_replacement():
    assert stream([HELLO, 0xF0, 0x9F]) == ["Hello", "", "", "\ufffd"]
    assert stream([HELLO, 0xF0, 0x9F, WORLD]) == ["Hello", "", "", "\ufffd world", ""]
    assert stream([0xFF, 0x80, WORLD]) == ["\ufffd", "\ufffd", " world", ""]


def test_the_leading_space_depends_on_the_prompt():
    assert stream([WORLD]) == ["world", ""]
    assert stream([WORLD], prompt=[BOS]) == ["world", ""]
    assert stream([WORLD], prompt=[BOS, HELLO]) == [" world", ""]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255 + len(WORDS))), st.integers(0, 50))
def test_prompt_and_continuation_join_to_the_whole(ids, n):
    before = StreamDecoder(Toy())
    text = "".join(map(before.feed, ids[:n])) + "".join(stream(ids[n:], prompt=ids[:n]))
    assert text == "".join(stream(ids))


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 3), max_size=50))
def test_rows_do_not_share_state(text, order):
    """Two streams fed in turns give what each gives alone."""
    rows = [text.encode(), text.encode()[::-1]]
    decoders, out, at = [StreamDecoder(Toy()) for _ in rows], ["", ""], [0, 0]
    for turn in [*(o % 2 for o in order), *[0] * len(rows[0]), *[1] * len(rows[1])]:
        if at[turn] < len(rows[turn]):
            out[turn] += decoders[turn].feed(rows[turn][at[turn]])
            at[turn] += 1
    assert [o + d.flush() for o, d in zip(out, decoders, strict=True)] == [r.decode(errors="replace") for r in rows]


@pytest.mark.parametrize(
    ("parts", "stops", "text", "stopped"),
    [
        (["Hi", "\nUser", ":", " x"], ["\nUser:"], "Hi", True),
        (["in", " Paris", "."], ["Pari"], "in ", True),
        (["a", "..."], [".."], "a", True),
        (["DEF", "G", "HI", "K"], ["DEFGHIJ"], "DEFGHIK", False),
        (["DEF", "G", "HI"], ["DEFGHIJ"], "DEFGHI", False),
        (["one two three"], ["three", "two"], "one ", True),
        (["aa", "ab"], ["aab"], "a", True),
        (["ab", "c"], ["abc", "b"], "", True),
        (["ab", "x"], ["abc", "b"], "a", True),
        (["ab"], ["abc", "b"], "a", False),
        (["x🦙y"], ["🦙"], "x", True),
        (["abc"], [], "abc", False),
        ([], ["a"], "", False),
    ],
)
def test_stop_strings(parts, stops, text, stopped):
    assert stop(parts, stops) == (text, stopped)


def test_only_what_could_become_a_stop_string_is_held_back():
    strings = StopStrings(["\nUser:", "END"])
    assert [strings.feed(t) for t in ("Hi\nUs", "ual\n", "EN", "d")] == [
        ("Hi", False),
        ("\nUsual", False),
        ("\n", False),
        ("ENd", False),
    ]
    assert strings.flush() == ("", False)


def test_a_stop_string_of_byte_tokens():
    """The stop string is found where its last byte completes it."""
    decoder, strings = StreamDecoder(Toy()), StopStrings(["🦙"])
    results = [strings.feed(decoder.feed(t)) for t in [HELLO, *"🦙".encode()]]
    assert results == [("Hello", False), *[("", False)] * 3, ("", True)]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


@settings(deadline=None)
@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12)),
)
def test_stop_strings_do_not_depend_on_the_parts(text, stops, at):
    """The text out is the text before the earliest stop string, however it is cut."""
    expected = re.split("|".join(map(re.escape, stops)), text, maxsplit=1)[0] if stops else text
    assert stop(cut(text, at), stops)[0] == expected


@settings(deadline=None)
@given(st.text("abc", max_size=12), st.text("abc", min_size=1, max_size=4), st.lists(st.integers(0, 12)))
def test_one_stop_string_is_a_split(text, stop_string, at):
    assert stop(cut(text, at), [stop_string]) == (text.split(stop_string)[0], stop_string in text)
