"""Every planted fault fits the tree; whether tests notice them is for ``planted_faults.py``."""

from __future__ import annotations

from planted_faults import ROOT, StaleFault, read_faults


def test_every_fault_can_be_planted() -> None:
    wrong = []
    for fault in read_faults():
        try:
            fault.find(ROOT)
            fault.arguments(ROOT)
        except StaleFault as error:
            wrong.append(f'{fault.room}: {fault.name}: {error}')
    assert wrong == []
