"""``tests.support.scripts`` runs scripts as an interpreter would."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.scripts import run_script, run_script_on_ranks


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    path = tmp_path / "script.py"
    path.write_text(
        "import os, subprocess, sys, time\n"
        "import beside\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__file__ == __file__\n"
        "print(beside.WORD, sys.argv[1:], os.environ.get('RANK'), os.environ.get('HOME'), flush=True)\n"
        "subprocess.run(['echo', 'of a child'])\n"
        "if sys.argv[1] == 'fails': sys.exit('in words')\n"
        "if sys.argv[1] == 'raises': raise ZeroDivisionError\n"
        "if sys.argv[1] == 'code': sys.exit(3)\n"
        "if sys.argv[1] == 'hangs': subprocess.run(['sleep', '1000'])\n"
    )
    return path


def test_what_a_script_sees_and_prints(script: Path) -> None:
    done = run_script(script, "runs", "two words", environment={"PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "beside ['runs', 'two words'] None None\nof a child\n"


@pytest.mark.parametrize(
    ("how", "code", "message"), [("fails", 1, "in words\n"), ("raises", 1, "ZeroDivisionError"), ("code", 3, "")]
)
def test_how_a_script_ends(script: Path, how: str, code: int, message: str) -> None:
    done = run_script(script, how)
    assert done.returncode == code
    assert message in done.stderr


def test_a_script_that_hangs_is_killed_with_its_children(script: Path) -> None:
    assert run_script(script, "hangs", seconds=3).returncode == -signal.SIGKILL


def test_ranks_get_the_variables_of_a_launcher(script: Path) -> None:
    printed = [
        done.stdout.splitlines()[0] for done in run_script_on_ranks(2, script, "runs", environment={"PATH": "/usr/bin:/bin"})
    ]
    assert printed == ["beside ['runs'] 0 None", "beside ['runs'] 1 None"]
