"""No test here asserts a time, so hypothesis does not either: machines that run tests are busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
