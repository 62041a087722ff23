"""Optional dependencies."""

import pytest

from wlb.errors import UserError, require


def test_a_missing_dependency_is_named_with_its_extra():
    with pytest.raises(UserError, match=r"nowhere is not installed; run: pip install 'wlb-llm\[data\]'"):
        require("nowhere.at.all", "data")
