"""What argues for the product: rival policies, the paper's results, published measurements, each in one simulator."""
