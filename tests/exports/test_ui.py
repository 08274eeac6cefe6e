"""What a user sees: traces in Perfetto's own UI, in Chromium, through `instr view`."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("session.png", "README.md"),
        ("layer.png", "README.md"),
        ("page.png", "docs/how-to/share-a-page.md"),
    ],
)
def test_the_pictures_are_small_and_shown(name: str, page: str) -> None:
    picture = ROOT / "docs" / "images" / name
    assert 10_000 < picture.stat().st_size < 200_000
    assert f"images/{name})" in (ROOT / page).read_text(encoding="utf-8")
