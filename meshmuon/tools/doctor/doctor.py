"""``meshmuon doctor``: proves and measures the library on the machines that it runs on. Checks are in the order of
their run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ...errors import ConfigError
from . import environment, exchanges, layouts, measurements, numerics
from .context import Check, Context, DoctorOptions
from .report import Report, report_as_json
from .runner import Runner

_LAYOUT = (
    "Run it again with --only {name}. If it fails again, report it with the output of --json: a layout that differs "
    "from one device is a bug of meshmuon, or of a kernel or collective below it (the checks above tell)."
)
_CONNECTION = (
    "Look for firewalls, for the wrong interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and for ranks on a full or "
    "lost device; NCCL_DEBUG=INFO tells more."
)
_JOIN = f"Start all ranks at the same time. {_CONNECTION}"
_MEASUREMENT = "Run it again with --only {name} on an idle machine."

CHECKS: tuple[Check, ...] = (
    Check("join", "ranks form a process group", _JOIN, exchanges.join, advice_if_stuck=_JOIN),
    Check(
        "versions",
        "ranks run the same software",
        "Install the same versions on all nodes: ranks that round differently drift apart.",
        environment.check_versions,
    ),
    Check(
        "products",
        "products against torch in float64",
        "Do not train: a kernel gives wrong results here. Update torch, Triton and the driver; without Triton, "
        "torch's products are used.",
        numerics.check_products,
    ),
    Check(
        "orthogonalisation",
        "orthogonalisation against an SVD in float64",
        "If products passed, report it with the output of --json; until then set compute_dtype=torch.float32.",
        numerics.check_orthogonalisation,
    ),
    Check(
        "pairs",
        "every pair of ranks connects",
        _CONNECTION,
        exchanges.check_pairs,
        fewest_ranks=2,
        advice_if_stuck=_CONNECTION,
    ),
    Check(
        "ragged",
        "ragged exchanges, with empty parts",
        "Do not train: exchanges deliver wrong data. Update torch and NCCL, and try another backend with --backend.",
        exchanges.check_ragged,
        fewest_ranks=2,
    ),
    Check("fsdp2", "FSDP2 against one device", _LAYOUT, layouts.check_fsdp2),
    Check("empty", "empty shards against one device", _LAYOUT, layouts.check_empty_shards, fewest_ranks=2),
    Check("hsdp", "HSDP against one device", _LAYOUT, layouts.check_hsdp),
    Check("tp", "TP × FSDP2 against one device", _LAYOUT, layouts.check_tp_fsdp),
    Check("ep", "EP × FSDP against one device", _LAYOUT, layouts.check_ep_fsdp),
    Check("ddp", "DDP against one device", _LAYOUT, layouts.check_ddp),
    Check("distmuon", "DistMuon against one device", _LAYOUT, layouts.check_dist_muon),
    Check("bf16", "bfloat16 on the wire against one device", _LAYOUT, layouts.check_bf16_wire),
    Check(
        "offload",
        "weights in host memory against weights on the device",
        "Train without CPUOffloadPolicy until it passes; turn_on_cpu_offload() still moves the optimizer's state to "
        "host memory. Report it with the output of --json.",
        layouts.check_host_memory,
    ),
    Check(
        "checkpoint",
        "a checkpoint moves to another mesh",
        "Look at the free space and the rights of the folder (--folder); otherwise report it with the output of "
        "--json.",
        layouts.check_checkpoint,
    ),
    Check("stress", "200 short steps under stress", _LAYOUT, layouts.check_stress),
    Check("rates", "rates of products", _MEASUREMENT, measurements.measure_rates, "measurements"),
    Check("links", "rates of links", _MEASUREMENT, measurements.measure_links, "measurements", fewest_ranks=2),
    Check("host", "the host's time", _MEASUREMENT, measurements.measure_host, "measurements"),
    Check("step", "a sharded step beside its prediction", _MEASUREMENT, measurements.measure_step, "measurements"),
)
_MEASUREMENTS = tuple(check.name for check in CHECKS if check.section == "measurements")
_ALWAYS = "join"


def chosen_checks(options: DoctorOptions) -> Sequence[Check]:
    """The checks that the user asked for, and ``join``, which all others need."""
    names = [check.name for check in CHECKS]
    unknown = [name for name in (*options.only, *options.skip) if name not in names]
    if unknown:
        raise ConfigError(f"there is no check {unknown[0]!r}; the checks are {', '.join(names)}.")
    both = [name for name in names if name in options.only and name in options.skip]
    if both:
        raise ConfigError(f"--only and --skip both name {both[0]!r}. Leave it out of one of them.")
    if _ALWAYS in options.skip:
        raise ConfigError(f"--skip cannot leave out {_ALWAYS!r}: all other checks need it. Remove it from --skip.")
    wanted = set(options.only or names) - set(options.skip) | {_ALWAYS}
    if options.save_file is not None and not wanted >= set(_MEASUREMENTS):
        raise ConfigError(f"--save needs the measurements {', '.join(_MEASUREMENTS)}: do not leave them out.")
    return [check for check in CHECKS if check.name in wanted]


def run_doctor(context: Context, stream: TextIO | None = None) -> int:
    """Runs the checks that the options ask for. Every rank calls it, from its main thread. Returns the exit code.

    Rank 0 reports to ``stream``, by default standard output, and writes the files. After a failure a thread may still
    wait for a lost rank: only the end of the process ends it.
    """
    began, options = time.monotonic(), context.options
    report = Report(None if context.rank else stream or sys.stdout)
    surroundings = environment.environment_of(context.device) if context.rank == 0 else {}
    report.title(context.world, surroundings)
    runner = Runner(context, chosen_checks(options), report)  # catches signals from now on
    passed = runner.run()
    if context.rank == 0:
        seconds = time.monotonic() - began
        report.close(runner.outcomes, seconds)
        calibration = measurements.calibration_of(context)
        saved = None if calibration is None else calibration.to_json()
        if options.json_file is not None:
            passed &= _written(
                options.json_file, report_as_json(context.world, surroundings, runner.outcomes, seconds, saved)
            )
        if options.save_file is not None and saved is not None:
            passed &= _written(options.save_file, saved)
        passed &= report.is_read
    runner.close()
    return 0 if passed else 1


def _written(path: Path, content: Any) -> bool:
    try:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"meshmuon doctor: {path} was not written: {error.strerror}.", file=sys.stderr)
        return False
    return True
