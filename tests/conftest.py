"""Settings that must be in place before torch is imported, and hypothesis profiles."""

from __future__ import annotations

import os

# Some virtual machines advertise AMX but trap its instructions, which kills bfloat16 products on CPU. No test needs AMX.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")

from hypothesis import HealthCheck, settings

# Machines are busy: a slow example is no failure, the timeout of each test is.
settings.register_profile("meshmuon", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ)
settings.load_profile("meshmuon")
