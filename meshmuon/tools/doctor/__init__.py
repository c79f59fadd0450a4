"""``meshmuon doctor``: checks and measurements that a user runs on their own cluster."""

from .catalog import CHECKS, chosen_checks
from .context import DoctorOptions, Session
from .doctor import Ending, run_doctor

__all__ = ["CHECKS", "DoctorOptions", "Ending", "Session", "chosen_checks", "run_doctor"]
