"""Known faults of this kind of software, by number: each of those about generating and training has a test that is named after it."""

import re

from helpers.tiny import ROOT

# 1: the text is the target's own. 2: caches and going back in them. 3: calls that people make. 4: memory and speed.
# 7: training.
SECTIONS = {
    1: (1, 2, 3, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16),
    2: (17, 18, 19, 21, 22, 23, 24, 25, 26, 28),
    3: (29, 30, 32, 33, 35, 36, 37, 38, 39, 40, 41, 43),
    4: (44, 45, 46, 47, 48, 49),
    7: (75, 76, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88),
}


def test_every_pitfall_has_a_test_named_after_it():
    named = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for numbers in re.findall(r"^def test_pitfall((?:_\d+)+)_[a-z]", path.read_text(encoding="utf-8"), re.M):
            named |= {int(number) for number in numbers.split("_")[1:]}
    missing = {section: sorted(set(numbers) - named) for section, numbers in SECTIONS.items() if set(numbers) - named}
    assert not missing
