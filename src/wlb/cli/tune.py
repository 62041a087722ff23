"""placeholder"""
def tune() -> None:
    """placeholder"""
