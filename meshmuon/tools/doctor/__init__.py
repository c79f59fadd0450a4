"""``meshmuon doctor``: checks and measurements that a user runs on their own cluster."""

from .catalog import CHECKS, chosen_checks
from .context import Context, DoctorOptions
from .doctor import Ending, run_doctor

__all__ = ["CHECKS", "Context", "DoctorOptions", "Ending", "chosen_checks", "run_doctor"]
