"""Ask a running server at random moments, and show how long its clients wait.

  python tools/load.py http://127.0.0.1:8080 [--rate=4] [--requests=100] [--prompt=20,200] [--answer=16,128] [--key=KEY]

Requests come as a Poisson process of `rate` a second (0: all at once); prompts are random words, answers streams.
Shown are percentiles of the time to the first token, between two pieces, and of whole requests, and tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import time

import httpx

_WORDS = (
    "the a dog cat girl boy tree house ran saw liked big small red blue happy and then but one day with her his".split()
)


@dataclasses.dataclass
class Seen:
    """What came of a request: moments in seconds since it was sent."""

    status: int = 0
    pieces: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    fault: str = ""


async def ask(client: httpx.AsyncClient, prompt: str, answer: int, seed: int) -> Seen:
    """Send one request, and follow its stream."""
    body = {
        "prompt": prompt, "max_tokens": answer, "seed": seed, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    seen, began = Seen(), time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            seen.status = response.status_code
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                seen.fault = json.dumps(event["error"]) if "error" in event else seen.fault
                if event.get("choices") and event["choices"][0]["text"]:
                    seen.pieces.append(time.perf_counter() - began)
                if event.get("usage"):
                    seen.tokens = event["usage"]["completion_tokens"]
    except httpx.HTTPError as e:
        seen.fault = repr(e)
    seen.end = time.perf_counter() - began
    return seen


async def load(args: argparse.Namespace) -> tuple[list[Seen], float]:
    """Send all requests; returns what came of them, and the seconds that they took together."""
    rng = random.Random(args.seed)
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    limits = httpx.Limits(max_connections=None)
    began, tasks = time.perf_counter(), []
    async with httpx.AsyncClient(base_url=args.url, headers=headers, timeout=600, limits=limits) as client:
        for number in range(args.requests):
            words = rng.choices(_WORDS, k=rng.randint(*args.prompt))
            tasks.append(asyncio.create_task(ask(client, " ".join(words), rng.randint(*args.answer), number)))
            await asyncio.sleep(rng.expovariate(args.rate) if args.rate else 0)
        return list(await asyncio.gather(*tasks)), time.perf_counter() - began


def percentiles(name: str, seconds: list[float]) -> str:
    """Return a line of a table."""
    if not seconds:
        return f"{name:22}     none"
    ranked = sorted(seconds)
    found = (ranked[min(int(len(ranked) * part), len(ranked) - 1)] for part in (0.5, 0.9, 0.99, 1))
    return f"{name:22}" + "".join(f"{1000 * x:9.0f}" for x in found)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(",")
    return int(low), int(high or low)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=_range, default=(20, 200), help="words, at least and at most")
    parser.add_argument("--answer", type=_range, default=(16, 128), help="tokens, at least and at most")
    parser.add_argument("--key", default="")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seen, seconds = asyncio.run(load(args))
    whole = [one for one in seen if one.status == 200 and not one.fault]
    codes = {code: sum(one.status == code for one in seen) for code in sorted({one.status for one in seen})}
    gaps = [b - a for one in whole for a, b in zip(one.pieces, one.pieces[1:], strict=False)]
    print(f"{len(whole)} of {len(seen)} whole in {seconds:.1f} s, by status: {codes}")
    print(f"{sum(one.tokens for one in whole) / seconds:.0f} tokens/s\n{'ms':22}      p50      p90      p99      max")
    print(percentiles("to the first token", [one.pieces[0] for one in whole if one.pieces]))
    print(percentiles("between pieces", gaps))
    print(percentiles("whole requests", [one.end for one in whole]))
    print(*{one.fault for one in seen if one.fault}, sep="\n", end="")


if __name__ == "__main__":
    main()
