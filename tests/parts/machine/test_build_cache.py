"""A cache of builds that belongs to another user is refused."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import wheel as build
from tests.parts.packaging.test_cache_of_builds import built, wheel

__all__ = ["built", "wheel"]  # fixtures

pytestmark = pytest.mark.native


@pytest.mark.usefixtures("wheel")
def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path / "cache" / "wheels", 12345, -1)
    with pytest.raises(BuildError, match="wheels belongs to another user"):
        build.build_wheel(stream=io.StringIO())
