"""A training loop with Accelerate and meshmuon, to copy and change. It downloads nothing.

One process:          python examples/accelerate_loop.py
Several, with DDP:    torchrun --nproc-per-node 2 examples/accelerate_loop.py
Several GPUs, FSDP2:  accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from meshmuon.integrations.hf import muon

VOCABULARY, LENGTH = 64, 32


def main(steps: int, accumulate: int) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=not torch.cuda.is_available())
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))
    optimizer = muon()(model, lr=3e-3, weight_decay=0.1)  # before prepare, which exchanges the parameters under FSDP2
    count = accelerator.num_processes * steps
    # Accelerate advances it once for every rank
    schedule = get_cosine_schedule_with_warmup(optimizer, count // 10, count)
    # the second half repeats the first
    tokens = torch.randint(VOCABULARY, (16 * accumulate * count, LENGTH // 2)).repeat(1, 2)
    labels = tokens.clone()
    labels[:, : LENGTH // 2] = -100
    samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    loader = DataLoader(samples, batch_size=16)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if len(losses) == 1 or len(losses) % 10 == 0:
                accelerator.print(f"step {len(losses):4d}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
    main(**vars(parser.parse_args()))
