"""placeholder"""
def prepare() -> None:
    """placeholder"""
