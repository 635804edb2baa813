"""docs/security.md, tests/defences.toml, the code and the tests name the same things."""

import re
from pathlib import Path

from tests.defences import ROOT, defences

PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = [line.strip("| ") for line in PAGE.partition("## Threats")[2].splitlines() if line.startswith("| ")]
THREATS = [row for row in ROWS if not row.startswith(("**", "threat |"))]
"""Rows of the table but its head and those that only divide it."""


def test_a_defence_stands_where_it_is_taken_out_and_its_row_names_what_tests_it() -> None:
    for defence in defences():
        assert defence.text != (ROOT / defence.file).read_text(), defence
        file, _, test = defence.test.partition("::")
        (row,) = (row for row in THREATS if row.startswith(defence.threat))
        assert Path(file).name in row, defence
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), defence


def test_every_threat_has_a_defence_that_can_be_taken_out() -> None:
    threats = {defence.threat for defence in defences()}
    assert [row for row in THREATS if not row.startswith(tuple(threats))] == []


def test_what_the_page_names_is_there() -> None:
    names = set(re.findall(r"[\w/.-]+\.(?:py|toml|md)\b", PAGE))
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.*") if ".venv" not in path.parts}
    assert {name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in there)} == set()
    for name in set(re.findall(r"\btest_\w+(?!\w*\.py)\b", PAGE)) - {Path(name).stem for name in names}:
        assert any(f"def {name}(" in path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), name
