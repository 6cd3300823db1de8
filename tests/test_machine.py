"""Cores: the process's own, within its container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime import machine


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("junk", 8)]
)
def test_the_quota_of_a_container_counts(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert machine.cores(tmp_path) == cores


def test_older_containers_too(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cores(tmp_path) == 3
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.cores(tmp_path) == 8


def test_without_a_quota_it_is_the_affinity(tmp_path: Path) -> None:
    assert machine.cores(tmp_path) == 8
