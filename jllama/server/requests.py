"""What both endpoints for text have in common: a request's fields as `Settings`, and what it asks of the answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jllama.errors import shown
from jllama.grammar import Grammars
from jllama.server.errors import ApiError, refusal
from jllama.server.fields import Fields
from jllama.settings import MOST_LIKELY, Settings
from jllama.tools import Turn

_INT32 = 2**31 - 1

# Names of a request -> fields of `Settings` that they set.
_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "logit_bias": "logit_bias",
    "response_format": "response_format",
    "min_tokens": "min_new_tokens",
}
# What would change the answer, and isn't here: each with the values that change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": ({},),
    "modalities": (["text"], []),
    "prediction": ({},),
    "web_search_options": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "typical_p": (1,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "samplers": (),
}
# What changes nothing that is answered.
# fmt: off
_IGNORED = frozenset({
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "moderation", "reasoning_effort",
    "verbosity", "cache_prompt", "keep_alive", "spaces_between_special_tokens", "priority", "request_id",
})
_TAKEN = frozenset({
    "messages", "prompt", "n", "stream", "stream_options", "logprobs", "top_logprobs", "echo",
    "max_tokens", "max_completion_tokens", "response_format", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "cache_salt",
})
# fmt: on


@dataclasses.dataclass(frozen=True)
class Given:
    """A prompt: its text, "" where there is none, its ids, and for a chat what turn of it they are."""

    text: str
    ids: list[int]
    turn: Turn | None = None


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that was understood.

    Args:
      prompts: to be answered, each `n` times.
      settings: how.
      most: the most tokens of an answer; None: as many as the context has room for.
      n: the number of answers to each prompt.
      stream: whether the answers are wanted as they come.
      usage: whether a stream ends with what it took.
      logprobs: how many likely tokens are wanted beside each token; None: no log-probabilities at all.
      echo: whether the prompt is a part of the text.
      salt: cached prompts are shared among requests of one salt.
    """

    prompts: list[Given]
    settings: Settings
    most: int | None
    n: int
    stream: bool
    usage: bool
    logprobs: int | None
    echo: bool
    salt: str


def asked(
    fields: Fields, prompts: list[Given], defaults: Settings, *, most: int | None, logprobs: int | None, n_most: int
) -> Asked:
    """Read what both endpoints take.

    Args:
      fields: the request's.
      prompts: to be answered.
      defaults: for what the request doesn't say.
      most: the most tokens of an answer where the request doesn't say it.
      logprobs: as in `Asked`.
      n_most: the most answers to a prompt.

    Raises:
      ApiError: a field that is wrong, or that would change the answer and isn't known.
    """
    _refuse(fields)
    wanted, options = _settings(fields, defaults), stream_options(fields)
    wanted = dataclasses.replace(wanted, top_logprobs=logprobs or 0)
    for given in prompts:
        wanted = _in_turn(given, wanted)
    found = [fields.within(name, 0, _INT32) for name in ("max_completion_tokens", "max_tokens")]
    return Asked(
        prompts,
        wanted,
        most=next((value for value in found if value is not None), most),
        n=fields.within("n", 1, n_most) or 1,
        stream=bool(fields.get("stream", bool)),
        usage=bool(options and options.get("include_usage", bool)),
        logprobs=logprobs,
        echo=bool(fields.get("echo", bool)),
        salt=fields.get("cache_salt", str) or "",
    )


def unknown(fields: Fields) -> list[str]:
    """Return the names of fields that nobody here has heard of."""
    known = _SETTINGS.keys() | _REFUSED.keys() | _IGNORED | _TAKEN
    return [shown(name) for name in fields.values if name not in known]


def top_logprobs(fields: Fields, name: str) -> int:
    """Return how many likely tokens are wanted beside each token."""
    return fields.within(name, 0, MOST_LIKELY) or 0


def stream_options(fields: Fields) -> Fields | None:
    """Return the options of a stream.

    Raises:
      ApiError: there are some, and it isn't one.
    """
    options = fields.get("stream_options", dict)
    if options is None:
        return None
    if not fields.get("stream", bool):
        raise refusal("stream_options", "stream_options are for streams: expected stream = true beside them")
    return Fields(options, "stream_options.")


def _refuse(fields: Fields) -> None:
    """Raise ApiError for what would change the answer."""
    for name, neutral in _REFUSED.items():
        if (value := fields.values.get(name)) is not None and value not in neutral:
            raise refusal(name, f"{name} is not supported here: leave it out")


def _settings(fields: Fields, defaults: Settings) -> Settings:
    """Return the settings that the request overrides, each checked by itself, so that the error can name it."""
    for name in ("logit_bias", "response_format"):
        fields.get(name, dict)  # `Settings` takes other forms as well
    changes = {
        setting: _checked(name, setting, fields.values[name])
        for name, setting in _SETTINGS.items()
        if name in fields.values
    }
    return dataclasses.replace(defaults, **changes)


def _in_turn(given: Given, settings: Settings) -> Settings:
    """Return the settings for a prompt, whose answer may have to be calls."""
    try:
        return settings if given.turn is None else given.turn.settings(settings)
    except ValueError as e:
        raise refusal("response_format", str(e)) from e


def check_form(grammars: Grammars, asked: Asked) -> None:
    """Raise ApiError for a form of answers that can't be compiled."""
    form = asked.settings.form
    try:
        if form is not None:
            grammars.check(form)
    except ValueError as e:
        is_call = any(given.turn and given.turn.form for given in asked.prompts)
        raise refusal("tools" if is_call else "response_format", str(e)) from e


def _checked(name: str, setting: str, value: Any) -> Any:
    try:
        return getattr(Settings(**{setting: value}), setting)
    except ValueError as e:
        raise refusal(name, str(e).replace(setting, name, 1)) from e


def check_length(ids: list[int], context: int, most: int | None) -> None:
    """Raise ApiError for a prompt after which no token fits, unless none is wanted."""
    fits = context if most == 0 else context - 1
    if len(ids) > fits:
        room = "" if len(ids) > context else ", and not one token of an answer fits beside it"
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens, the model's context {context}{room}",
            kind="exceed_context_size_error",
            code="context_length_exceeded",
            n_prompt_tokens=len(ids),
            n_ctx=context,
        )
