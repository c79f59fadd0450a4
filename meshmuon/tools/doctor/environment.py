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

from ...device import cpu_info, hardware_of
from ...torch_compat import available_backends
from ...transport import all_gather_objects
from .context import Context, Finding

_OPTIONAL = {  # what each is for
    "triton": "symmetric products on a GPU",
    "numpy": "Triton's interpreter, plots",
    "rich": "colours, tables and progress",
    "transformers": "HF Trainer",
    "accelerate": "HF Accelerate",
    "lightning": "Lightning and Fabric",
    "torchtitan": "torchtitan",
}
_VARIABLES = (
    "NCCL_",
    "GLOO_",
    "TORCH_NCCL_",
    "OMP_NUM_THREADS",
    "MKL_",
    "ONEDNN_",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "MESHMUON_",
)
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
_PROBE = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); assert float((a @ a)[0, 0]) == 256"


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The model of the CPU, and which of the features that matter here it has."""
    info = cpu_info()
    flags = set(info.get("flags", info.get("Features", "")).split())
    name = info.get("model name") or platform.processor() or platform.machine()
    return (
        f"{name}, {os.cpu_count()} cores, {', '.join(f for f in _FEATURES if f in flags) or 'no vector features known'}"
    )


@lru_cache(maxsize=1)
def bfloat16_works() -> bool:
    """Whether a bfloat16 product on the CPU ends well. Some virtual machines advertise AMX and kill the process that
    uses it.

    Asked in a separate process, and only where there is a doubt.
    """
    flags = set(cpu_info().get("flags", "").split())
    if "amx_tile" not in flags or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return True
    try:
        return (
            subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=60, check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def _links(device: torch.device) -> str:
    """What connects devices and nodes, as far as the system tells."""
    peers = hardware_of(device).peers()
    texts = [] if peers is None else [f"{peers[0]} of {peers[1]} pairs of GPUs reach each other's memory"]
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    texts.append(f"InfiniBand or RoCE: {', '.join(cards) or 'none'}")
    texts.append(f"interfaces: {', '.join(name for _, name in socket.if_nameindex())}")
    return "; ".join(texts)


def environment_of(device: torch.device) -> dict[str, str]:
    hardware, triton = hardware_of(device), version_of("triton")
    devices = "CPU" if device.type == "cpu" else f"{hardware.count()} × {hardware.name(device)}"
    used = "" if torch.cuda.is_available() else ", not used: it needs a GPU"
    missing = [f"{name} ({purpose})" for name, purpose in _OPTIONAL.items() if version_of(name) is None]
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    environment = {
        "meshmuon": meshmuon.__version__,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.backends.cpu.get_cpu_capability()}",
        "python": f"{platform.python_version()}, {platform.system()} on {platform.machine()}",
        "CPU": cpu_name(),
        "devices": ", ".join(filter(None, [devices, hardware.details(device)])),
        "links": _links(device),
        "backends": ", ".join(available_backends()) or "none",
        "triton": "missing: pip install 'meshmuon[kernels]'" if triton is None else f"{triton}{used}",
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
        "device": hardware_of(context.device).name(context.device),
        "threads": str(torch.get_num_threads()),
    }
    group = dist.group.WORLD
    assert group is not None
    everyone = list(all_gather_objects(own, group).values())
    usual = {name: Counter(of_rank[name] for of_rank in everyone).most_common(1)[0][0] for name in own}
    problems = [f"{name} is {own[name]}, on most ranks it is {usual[name]}" for name in own if own[name] != usual[name]]
    return Finding("versions, devices and threads are the same on all ranks", problems)
