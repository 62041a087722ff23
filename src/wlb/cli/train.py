"""placeholder"""
def train() -> None:
    """placeholder"""
