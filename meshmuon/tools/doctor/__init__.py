"""``meshmuon doctor``: checks and measurements that a user runs on their own cluster."""

from .context import Context, DoctorOptions
from .doctor import CHECKS, chosen_checks, run_doctor

__all__ = ["CHECKS", "Context", "DoctorOptions", "chosen_checks", "run_doctor"]
