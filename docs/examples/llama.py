"""Train a Llama of HuggingFace's transformers under OptPipe, in a training loop of your own.

    pip install 'optpipe[hf]'
    python llama.py plan plan.json
    torchrun --nproc-per-node 2 llama.py train plan.json

The model is built from its config with random weights; nothing is fetched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import optpipe

MICROBATCHES, MICROBATCH_SIZE, CONTEXT = 4, 2, 32
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    attn_implementation="sdpa",
)
STEPS = 5


class Block(nn.Module):
    """A decoder layer that takes one tensor and gives one: it makes its rotary embedding by itself."""

    def __init__(self, model: LlamaForCausalLM, number: int) -> None:
        super().__init__()
        self.layer = model.model.layers[number]
        self.rotary = model.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        # Without a mask, and with several positions, attention is causal.
        out = self.layer(x, position_embeddings=self.rotary(x, position_ids=positions), position_ids=positions)
        return out if isinstance(out, Tensor) else out[0]


def layers_of(model: LlamaForCausalLM) -> list[nn.Module]:
    """The model as a list of layers along it."""
    blocks = [Block(model, number) for number in range(model.config.num_hidden_layers)]
    return [model.model.embed_tokens, *blocks, nn.Sequential(model.model.norm, model.lm_head)]


def build() -> LlamaForCausalLM:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Of a microbatch: the mean over its tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes of this file, the same on every rank."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (MICROBATCHES * MICROBATCH_SIZE,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def plan(path: str) -> None:
    """Measure the model on one process, and solve for two devices with half of the memory that 1F1B takes."""
    from runtime.own_model import measure

    inputs, targets = (part[:MICROBATCH_SIZE] for part in next(batches()))
    problem, partition = measure(
        layers_of(build()),
        loss_fn,
        inputs,
        targets,
        stage_devices=(0, 1),
        microbatches=MICROBATCHES,
        bandwidth=2e9,
        name="llama",
    )
    budget = 3 * max(stage.activation_bytes for stage in problem.stages) // 2
    found = optpipe.solve(problem.with_budgets([budget] * 2), time_limit=5)
    found.extra["partition"] = partition
    found.write(path)
    print(found)


def train(path: str) -> None:
    """Every rank runs this; the loss is the same on all of them."""
    from runtime.pipeline import Pipeline, join

    rank = join()
    example = next(batches())[0][:MICROBATCH_SIZE]
    with Pipeline(optpipe.load(path), layers_of(build()), loss_fn, example) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        for step, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
            loss = pipeline.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step + 1}  loss {loss:.5f}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("plan", "train"):
        sys.exit(__doc__)
    {"plan": plan, "train": train}[sys.argv[1]](sys.argv[2])
