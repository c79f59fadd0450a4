"""Scripts run as ``python script.py`` runs them, in processes forked from a server that has imported torch.

Starting an interpreter and importing torch takes seconds for each process, forking takes none. The script is
``__main__``, has its own arguments, environment and folder at the head of ``sys.path``, and may start processes of its
own.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from .processes import fork_server

_HANGS = 240.0  # seconds; only ends what hangs

Completed = subprocess.CompletedProcess[str]


def run_script(
    script: Path, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = _HANGS
) -> Completed:
    """Runs a script to its end. ``environment`` is the whole of it; without it the script gets this process's."""
    return _run(script, arguments, [{**os.environ} if environment is None else environment], seconds)[0]


def run_script_on_ranks(
    ranks: int, script: Path, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = _HANGS
) -> list[Completed]:
    """Runs a script on several ranks, with the environment variables that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common = {**(os.environ if environment is None else environment), **world}
    return _run(
        script, arguments, [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)], seconds
    )


def _run(
    script: Path, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], seconds: float
) -> list[Completed]:
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(rank)) for rank in range(len(environments))]
        processes = []
        for place, environment in zip(places, environments, strict=True):
            place.mkdir()
            args = (str(script), tuple(arguments), dict(environment), str(place))
            processes.append(context.Process(target=_script_main, args=args))  # no daemon: it may have children
            processes[-1].start()
        _end(processes, seconds)
        return [
            Completed(
                [str(script), *arguments],
                process.exitcode if process.exitcode is not None else -signal.SIGKILL,
                (place / "out").read_text(),
                (place / "err").read_text(),
            )
            for process, place in zip(processes, places, strict=True)
        ]


def _end(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Waits for all of them; whoever still runs after so many seconds is killed with the processes that it has
    started.
    """
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _script_main(script: str, arguments: Sequence[str], environment: Mapping[str, str], place: str) -> None:
    os.setpgid(0, 0)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(place, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code)
