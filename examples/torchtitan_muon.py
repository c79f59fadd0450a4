"""torchtitan's configs with meshmuon instead of AdamW, to copy and extend.

Start one from the folder of this file, on GPUs:
torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_muon --config llama3_8b_muon --optimizer.lr 3e-4
"""

from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from meshmuon.integrations.torchtitan import muon


def llama3_debugmodel_muon() -> Trainer.Config:
    config = llama3_debugmodel()
    config.optimizer = muon(lr=3.2e-3)  # a small model: four times AdamW's learning rate
    return config


def llama3_8b_muon() -> Trainer.Config:
    config = llama3_8b()
    config.optimizer = muon(lr=3e-4, weight_decay=0.1)
    return config
