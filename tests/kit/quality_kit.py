"""A text for figures of outputs, like what the demo model learned."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tools.demo_model.grammar import stories

CHUNKS = 4
"""the text is longer than this many chunks"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stories like those that the demo model learned; more than CHUNKS chunks."""
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    some = islice(stories(7), 30)
    path.write_text("\n\n".join(story.text for story in some) + "\n", encoding="utf-8")
    return path
