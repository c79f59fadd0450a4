"""What the workflow file calls exists, is pinned, and covers the supported versions. Read as text: no YAML parser
is needed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshmuon import torch_compat
from tests.support.optional import development_torch

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
TEXT = WORKFLOW.read_text()
JOBS = re.split(r"^  (?=[\w-]+:\n)", TEXT[TEXT.index("\njobs:\n") :], flags=re.MULTILINE)[1:]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def make_variables() -> set[str]:
    return set(re.findall(r"\$\((\w+)\)", (ROOT / "Makefile").read_text()))


def test_make_targets_and_variables_exist() -> None:
    calls = re.findall(r"run: make ([\w-]+)(.*)$", TEXT, flags=re.MULTILINE)
    assert {target for target, _ in calls} == {"lint", "test", "test-torch", "docs", "package"}
    assert {target for target, _ in calls} <= make_targets()
    assert set(re.findall(r"(\w+)=", " ".join(arguments for _, arguments in calls))) <= make_variables()


def test_actions_are_pinned_to_commits() -> None:
    uses = re.findall(r"uses: (\S+)(.*)$", TEXT, flags=re.MULTILINE)
    assert len(uses) > 10
    for action, note in uses:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", note), f"{action} does not say its version"
    assert len({action for action, _ in uses}) == len({action.split("@")[0] for action, _ in uses}), (
        "one action at two versions"
    )


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.split(":")[0])
def test_jobs_are_bounded_and_cached(job: str) -> None:
    assert re.search(r"timeout-minutes: \d+", job)
    assert "cache: pip" in job
    assert "persist-credentials: false" in job


def test_nothing_may_be_written() -> None:
    assert re.search(r"^permissions:\n  contents: read\n", TEXT, flags=re.MULTILINE)
    assert "write" not in TEXT.replace("written", "")
    assert "pull_request_target" not in TEXT
    assert "concurrency:" in TEXT


def test_all_supported_versions_are_run() -> None:
    torches = {*re.findall(r'torch: "([\d.]+)"', TEXT), development_torch()}
    assert {torch_compat.OLDEST, torch_compat.NEWEST} <= torches
    assert {"3.11", "3.12", "3.13"} <= set(re.findall(r'"(3\.\d+)"', TEXT))
