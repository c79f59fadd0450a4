"""States of Keller Jordan's Muon, nanochat's, dion's and Motif's, converted for this one."""

from .tools.migrate import convert_dion_state, convert_keller_state, convert_motif_state, convert_nanochat_state

__all__ = ["convert_dion_state", "convert_keller_state", "convert_motif_state", "convert_nanochat_state"]
