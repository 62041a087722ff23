"""Many small cases in one test: each test of its own costs milliseconds, here and where results are collected."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

Test = Callable[..., None]


def in_turn(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize``, but all ``cases`` are one test, and the first that fails is named.

    They share the fixtures of the test.
    """

    def decorator(test: Test) -> Test:
        given = (names,) if isinstance(names, str) else names

        @wraps(test)
        def all_in_turn(*arguments: Any, **fixtures: Any) -> None:
            tried = 0
            for case in cases:
                values = dict(zip(given, (case,) if isinstance(names, str) else case, strict=True))
                try:
                    test(*arguments, **fixtures, **values)
                except BaseException as error:
                    error.add_note(f"in the case {values}")
                    raise
                tried += 1
            assert tried, "there are no cases"

        parameters = inspect.signature(test).parameters
        left = [parameter for name, parameter in parameters.items() if name not in given]
        all_in_turn.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return all_in_turn

    return decorator
