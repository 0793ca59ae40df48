"""Every public fault report in tests/field-reports.md names tests of its kind, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_report_has_a_test_that_exists() -> None:
    rows = [row.split("|") for row in (TESTS / "field-reports.md").read_text().splitlines() if row.startswith("| ")]
    assert len(rows) > 30
    for _, report, _, named, _ in rows[1:]:
        found = re.findall(r"`([^`:]+)(?:::(\w+))?`", named)
        assert found, report
        for file, test in found:
            text = (TESTS / file).read_text()
            assert re.search(rf"def {test or 'test_'}", text), f"{report}: {file}::{test}"
