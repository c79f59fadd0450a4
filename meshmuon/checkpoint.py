"""Checkpoints beyond ``state_dict``: detecting damaged files, and converting the state of torch's own optimizers."""

from .tools.checkpoint import MANIFEST, Progress, verify, write_manifest
from .tools.migrate import convert_torch_state

__all__ = ["MANIFEST", "Progress", "convert_torch_state", "verify", "write_manifest"]
