"""``meshmuon doctor``: checks and measurements that a user runs on their own cluster."""

from .context import Context, DoctorOptions
from .doctor import CHECKS, Ending, chosen_checks, run_doctor

__all__ = ["CHECKS", "Context", "DoctorOptions", "Ending", "chosen_checks", "run_doctor"]
