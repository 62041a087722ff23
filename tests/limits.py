"""How long tests wait for something before they call it hung, and how many random examples they try."""

from hypothesis import settings

# Many times what anything here takes on an idle machine, as only what hangs takes so long. It is less than pytest's
# limit in pyproject.toml, which bounds everything else, so that a test says itself what it waited for.
HUNG_SECONDS = 900.0
USUAL_EXAMPLES, EXHAUSTIVE_EXAMPLES = 40, 300


def examples(usual: int) -> int:
    """Random examples of a test of which the profile ``usual`` tries so many; ``exhaustive`` tries 7.5 times that."""
    return usual * settings().max_examples // USUAL_EXAMPLES
