"""Ray Data as the engine of large jobs, on a cluster of two workers here."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from console import write_model

from jllama import LLM, Prompt, Settings
from jllama.ray import Generate

SETTINGS = {"seed": 3, "max_new_tokens": 6}
PROMPTS = [f"{'the cat ' * (i % 5)}number {i}" for i in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def expected(model: Path, **load: object) -> dict[str, tuple[str, str]]:
    """The texts of a single process, by prompt; every third has a temperature of its own."""
    settings = [Settings(**SETTINGS, **({"temperature": 0.0} if i % 3 == 0 else {})) for i in range(len(PROMPTS))]
    found = LLM.load(model, **load).generate([Prompt(*pair) for pair in zip(PROMPTS, settings, strict=True)])
    return {completion.prompt: (completion.text, completion.finish_reason) for completion in found}


def test_columns_are_added_and_override_the_settings(model: Path) -> None:
    temperature = np.array([0.0 if i % 3 == 0 else np.nan for i in range(len(PROMPTS))])
    rows = {"question": np.array(PROMPTS, object), "n": np.arange(len(PROMPTS)), "temperature": temperature}
    found = Generate(str(model), prompt="question", settings=SETTINGS)(rows)
    texts = dict(zip(found["question"], zip(found["text"], found["finish_reason"], strict=True), strict=True))
    assert texts == expected(model)
    assert found["n"].tolist() == list(range(len(PROMPTS)))
    assert (found["tokens"] <= 6).all()
    with pytest.raises(ValueError, match="no column 'prompt': expected it among question, n, temperature"):
        Generate(str(model))(rows)


class Dying(Generate):
    """A worker that is killed at its second batch, unless another was before."""

    def __init__(self, checkpoint: str, mark: str, **options: object) -> None:
        super().__init__(checkpoint, **options)
        self._mark, self._calls = Path(mark), 0

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._calls += 1
        if self._calls == 2 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_every_prompt_is_answered_once_though_a_worker_dies(model: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: large jobs are not tested with it")
    pytest.importorskip("ray.data")
    lines = [{"prompt": p} | ({"temperature": 0.0} if i % 3 == 0 else {}) for i, p in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # workers find this file too
    runtime = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=runtime)
    try:
        answers = ray.data.read_json(str(tmp_path / "prompts.jsonl")).map_batches(
            Dying,
            fn_constructor_args=(str(model), str(tmp_path / "died")),
            fn_constructor_kwargs={"settings": SETTINGS},
            batch_size=8,
            concurrency=2,
            num_cpus=1,
        )
        answers.write_parquet(str(tmp_path / "answers"))
        rows = ray.data.read_parquet(str(tmp_path / "answers")).take_all()
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()
    assert sorted(row["prompt"] for row in rows) == sorted(PROMPTS)
    assert {row["prompt"]: (row["text"], row["finish_reason"]) for row in rows} == expected(model)
