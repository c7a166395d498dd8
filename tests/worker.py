"""One of several processes with one mesh: says as JSON how much of a checkpoint it read, and what comes out."""

import json
import sys

import jax
import numpy as np

from jllama import LLM, checkpoint, processes, tokenizer
from jllama.checkpoint.build import build_params
from jllama.checkpoint.source import Source
from jllama.mesh import make_mesh

read = dict[str, int]()  # elements of each tensor


def recording(name: str, source: Source) -> Source:
    def rows(start: int, stop: int) -> np.ndarray:
        block = source.read(start, stop)
        read[name] = read.get(name, 0) + block.size
        return block

    return source._replace(read=rows)


def main(path: str, port: str, process: str) -> None:
    processes.connect(f"127.0.0.1:{port}", 2, int(process))
    mesh = make_mesh("model:2")
    found = checkpoint.read(path)
    sources = {name: recording(name, source) for name, source in found.sources.items()}
    params = build_params(found.config, sources, dtype="float32", origin=path, mesh=mesh)
    llm = LLM(params, tokenizer.load(tokenizer.find(path)))
    drawn = llm.generate(["one"], max_new_tokens=8, temperature=1.0)  # the seed is drawn by one process
    score = llm.score("one two three")
    result = {
        "read": read,
        "here": sum(shard.data.size for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards),
        "drawn": [completion.text for completion in drawn],
        "stream": "".join(llm.stream("one 0", max_new_tokens=12, temperature=0)),
        "score": score.logprobs.tolist(),
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
