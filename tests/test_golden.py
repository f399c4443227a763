"""Golden runs end as they did when tests/golden.json was written."""

import json
from typing import Any

import pytest

from tests.golden import FILE, cases, differences, outcome

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", sorted(cases()))
def test_a_golden_run_ends_as_it_did(name: str) -> None:
    golden = GOLDEN | {"runs": {name: GOLDEN["runs"][name]}}
    assert not differences(golden, {name: outcome(*cases()[name])})


def test_another_loss_and_other_bits_are_found() -> None:
    found = {name: dict(run) for name, run in GOLDEN["runs"].items()}
    found["fedavg"]["loss"] *= 1.01
    found.pop("cnn")
    assert [line.split(":")[0] for line in differences(GOLDEN, found)] == ["cnn", "fedavg"]
