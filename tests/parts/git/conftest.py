"""A tiny patch set and its editable tree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kit.patches_kit import World, make_world


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny patch set and its editable tree, for tests that do not change them."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(shared_world: World, tmp_path: Path) -> World:
    """Like `shared_world`, for one test alone."""
    shutil.copytree(shared_world.patches, tmp_path / "patches")
    own = World(shared_world.sdist, tmp_path / "patches", tmp_path / "tree")
    own.edit()
    return own
