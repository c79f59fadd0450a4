"""A rank of a doctor under a real launcher, with a fault: ``torchrun … faulty_rank.py FAULT RANK FOLDER ARGUMENTS``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from meshmuon.tools.cli.main import main
from tests.tools.doctor.faults import FAULTS

if __name__ == "__main__":
    fault, rank, folder, *arguments = sys.argv[1:]
    with FAULTS[fault if os.environ["RANK"] == rank else ""](Path(folder)):
        raise SystemExit(main(arguments))
