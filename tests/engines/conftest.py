"""Real engines, each in an environment of its own (./run test-engines makes them), on a tiny model.

A test starts a script of this folder with the engine's interpreter and reads the JSON that it ends
with. Without the environment, tests skip with that reason.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from store_support import ROOT

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = Path(os.environ.get("FLASHKV_ENGINES") or ROOT / ".engines")
RESULT = "RESULT "  # begins the line with a script's JSON
VOCABULARY = 512

Run = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(900))


def interpreter(engine: str) -> Path:
    return ENVIRONMENTS / engine / "bin" / "python"


@pytest.fixture
def run_engine(tmp_path: Path) -> Run:
    """Runs a script with an engine's interpreter and returns what it says at its end.

    run_engine("vllm", "script.py", *arguments, **environment). The script lies in this folder, sees
    the tree's flashkv, computes with one thread, and prints one line of RESULT and JSON. A failure
    shows the end of its output.
    """

    def run(engine: str, script: str, *arguments: object, **environment: str) -> Any:
        python = interpreter(engine)
        if not python.exists():
            pytest.skip(f"no environment for {engine} here: ./run test-engines makes it")
        command: Sequence[str] = [str(python), str(HERE / script), *map(str, arguments)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
        )
        output = done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
        assert done.returncode == 0, output[-6000:]
        assert lines, output[-6000:]
        print(output[-20_000:])  # shown where the test fails
        return json.loads(lines[-1][len(RESULT) :])

    return run


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a model of random weights and returns its folder.

    random_model(name, architecture, configuration, std=..., **settings): 4 layers, 2 KV heads of
    32, float32, VOCABULARY token ids; std: of its weights. architecture and configuration are names
    of transformers' classes.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(
        name: str, architecture: str, configuration: str, *, std: float, **settings: Any
    ) -> Path:
        torch.manual_seed(0)
        config = getattr(transformers, configuration)(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
            **settings,
        )
        model = getattr(transformers, architecture)(config)
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=std)
        folder = tmp_path_factory.mktemp("model") / name
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(random_model: Callable[..., Path]) -> Path:
    """Folder of a Llama whose greedy text depends on the whole context."""
    return random_model(
        "tiny-llama", "LlamaForCausalLM", "LlamaConfig", std=0.25, tie_word_embeddings=True
    )


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """1,500 token ids, none of them twice in a short distance."""
    return [(i * 7919) % (VOCABULARY - 3) + 1 for i in range(1500)]
