"""How long tests wait for something before they call it hung."""

# Many times what anything here takes on an idle machine, as only what hangs takes so long. It is less than pytest's
# limit in pyproject.toml, which bounds everything else, so that a test says itself what it waited for.
HUNG_SECONDS = 900.0
