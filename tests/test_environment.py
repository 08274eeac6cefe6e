"""The tests are the same for every user, terminal and place."""

from __future__ import annotations

import os
import time

from tests.kit.fixed_environment import FIXED, fix_environment

OTHERS = {
    "COLUMNS": "211", "FORCE_COLOR": "1", "GIT_DIR": "/elsewhere", "LANG": "de_DE.UTF-8",
    "LC_ALL": "tr_TR.UTF-8", "LC_TIME": "ja_JP.UTF-8", "LLAMA_INSTR_LOG": "a.log",
    "NO_COLOR": "1", "PYTHONWARNINGS": "error", "TERM": "dumb", "TZ": "Asia/Kolkata",
}  # fmt: skip
"""what a user may have set"""


def test_the_settings_of_a_user_are_gone_and_the_caches_remain() -> None:
    places = {"HOME": "/home/a", "LLAMACPP_INSTR_CACHE": "/cache", "PATH": "/bin", "CXX": "g++"}
    environment = {**OTHERS, **places, "no_proxy": "index.example"}
    fix_environment(environment)
    assert environment.pop("no_proxy") == "index.example,127.0.0.1,localhost"
    assert environment.pop("NO_PROXY") == "127.0.0.1,localhost"
    assert environment == {**FIXED, **places}


def test_this_process_has_it() -> None:
    assert FIXED.items() <= os.environ.items()
    assert os.environ.keys().isdisjoint(OTHERS.keys() - FIXED.keys())
    assert time.tzname == ("UTC", "UTC")
    mask = os.umask(0o022)
    assert mask == 0o022
