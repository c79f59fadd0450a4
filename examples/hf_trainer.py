"""Trains a small Llama with Transformers' Trainer and meshmuon, to copy and change. It downloads nothing.

One process:          python examples/hf_trainer.py
Several, with DDP:    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
Several GPUs, FSDP2:  torchrun --standalone --nproc-per-node 8 examples/hf_trainer.py --fsdp2
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from meshmuon.integrations.hf import muon

VOCABULARY, LENGTH = 64, 32


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens whose second half repeats the first: a model that looks back can predict it."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(VOCABULARY, (count, LENGTH // 2), generator=generator)
    unpredictable = torch.full((LENGTH // 2,), -100)  # ignored by the loss
    return [{"input_ids": half.repeat(2), "labels": torch.cat([unpredictable, half])} for half in halves]


def main(steps: int, folder: str, fsdp2: bool, resume: bool) -> None:
    args = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 10),
        save_steps=max(1, steps // 2),
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        fsdp=fsdp2,
        disable_tqdm=True,
    )
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))
    # lr, weight decay and AdamW's betas come from the arguments; every option of Muon may stand beside them.
    optimizer = (muon, {"training_args": args, "momentum": 0.95})
    trainer = Trainer(model, args, train_dataset=samples(32 * steps), optimizer_cls_and_kwargs=optimizer)
    if trainer.is_world_process_zero():
        print(muon()(model, args).routing_table())
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="runs/hf_trainer", help="where checkpoints go")
    parser.add_argument(
        "--fsdp2", action="store_true", help="shard the model (on GPUs; Accelerate has no FSDP on CPUs)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    main(**vars(parser.parse_args()))
