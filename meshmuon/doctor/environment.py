"""What the checks run on: versions, devices, links, backends, the kind of CPU, and what is optional and missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

import meshmuon

from ..transport import all_gather_objects
from .check import Finding
from .context import Context

_OPTIONAL = {  # what each is for
    "triton": "symmetric products on a GPU",
    "numpy": "Triton's interpreter, plots",
    "rich": "tables and progress",
    "transformers": "HF Trainer",
    "accelerate": "HF Accelerate",
    "lightning": "Lightning and Fabric",
    "torchtitan": "torchtitan",
}
_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "MKL_", "ONEDNN_", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
_PROBE = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); assert float((a @ a)[0, 0]) == 256"


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_info() -> dict[str, str]:
    """The first entry of each name in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in reversed(lines) if ":" in line]
    return {name.strip(): value.strip() for name, value in pairs}


def cpu_name() -> str:
    """The model of the CPU, and which of the features that matter here it has."""
    info = _cpu_info()
    flags = set(info.get("flags", info.get("Features", "")).split())
    name = info.get("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {', '.join(f for f in _FEATURES if f in flags) or 'no vector features known'}"


@lru_cache(maxsize=1)
def bfloat16_works() -> bool:
    """Whether a bfloat16 product on the CPU ends well. Some virtual machines advertise AMX and kill the process that uses it.

    Asked in a process of its own, and only where there is a doubt.
    """
    flags = set(_cpu_info().get("flags", "").split())
    if "amx_tile" not in flags or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return True
    try:
        return subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def device_name(device: torch.device) -> str:
    """The name of a device, as its vendor calls it."""
    if device.type == "cpu":
        return _cpu_info().get("model name") or platform.machine()
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)


def _devices(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} {'thread' if threads == 1 else 'threads'} per rank"
    module = torch.get_device_module(device)
    count = module.device_count()
    text = f"{count} × {device_name(device)}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        text += f", {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
    return text


def _links(device: torch.device) -> str:
    """What connects devices and nodes, as far as the system tells."""
    texts = []
    if device.type == "cuda":
        count = torch.cuda.device_count()
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        reach = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        texts.append(f"{reach} of {len(pairs)} pairs of GPUs reach each other's memory")
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    texts.append(f"InfiniBand or RoCE: {', '.join(cards) or 'none'}")
    texts.append(f"interfaces: {', '.join(name for _, name in socket.if_nameindex())}")
    return "; ".join(texts)


def _backends() -> str:
    known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return ", ".join(name for name, available in known.items() if available) or "none"


def _triton() -> str:
    version = version_of("triton")
    if version is None:
        return "missing: pip install 'meshmuon[kernels]'"
    return version if torch.cuda.is_available() else f"{version}, not used: it needs a GPU"


def environment_of(device: torch.device) -> dict[str, str]:
    """This rank's surroundings."""
    missing = [f"{name} ({purpose})" for name, purpose in _OPTIONAL.items() if version_of(name) is None]
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    environment = {
        "meshmuon": meshmuon.__version__,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.backends.cpu.get_cpu_capability()}",
        "python": f"{platform.python_version()}, {platform.system()} on {platform.machine()}",
        "CPU": cpu_name(),
        "devices": _devices(device),
        "links": _links(device),
        "backends": _backends(),
        "triton": _triton(),
        "missing": ", ".join(missing) or "nothing that is optional",
        "variables": ", ".join(variables) or "none",
    }
    if device.type == "cpu" and not bfloat16_works():
        environment["bfloat16"] = "products on this CPU kill the process: set ONEDNN_MAX_CPU_ISA=AVX10_1_512"
    return environment


def check_versions(context: Context) -> Finding:
    """All ranks run the same versions on the same kind of device."""
    own = {
        "meshmuon": meshmuon.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "Triton": version_of("triton") or "none",
        "device": device_name(context.device),
        "threads": str(torch.get_num_threads()),
    }
    group = dist.group.WORLD
    assert group is not None
    everyone = list(all_gather_objects(own, group).values())
    usual = {name: Counter(of_rank[name] for of_rank in everyone).most_common(1)[0][0] for name in own}
    problems = [f"{name} is {own[name]}, on most ranks it is {usual[name]}" for name in own if own[name] != usual[name]]
    return Finding("versions, devices and threads are the same on all ranks", problems)
