"""placeholder"""
def compare() -> None:
    """placeholder"""
