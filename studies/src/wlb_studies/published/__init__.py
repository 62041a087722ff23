"""The simulator beside measurements that others published: kernels, whole steps, and batches document by document."""
