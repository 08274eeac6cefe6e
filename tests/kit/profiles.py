"""How hypothesis draws the examples of the tests: the same ones in every run, or others in each."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

SAME, EXPLORE = "same", "explore"
SETTINGS = ("backend", "database", "deadline", "derandomize", "print_blob", "suppress_health_check")
"""that belong to a profile, so no test has its own"""


def load_profiles() -> None:
    """Makes both profiles known, and draws the same examples from now on."""
    common: dict[str, Any] = {
        # none of these may depend on the machine's speed, or on what was drawn before
        "deadline": None,
        "database": None,
        "suppress_health_check": [
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            # the examples of a test write the same files, one after the other
            HealthCheck.function_scoped_fixture,
        ],
    }
    settings.register_profile(SAME, derandomize=True, print_blob=False, **common)
    settings.register_profile(EXPLORE, derandomize=False, print_blob=True, **common)
    settings.load_profile(SAME)
    _ignore_constants()


def _ignore_constants() -> None:
    """Leaves out numbers and strings that hypothesis finds in the source of the product's loaded
    modules: what is loaded depends on the tests that ran before. Exploring keeps them."""
    constants = getattr(providers, "_get_local_constants", None)
    if constants is not None:  # older versions have none
        none = providers.Constants()
        providers._get_local_constants = lambda: (
            none if settings.default.derandomize else constants()
        )
