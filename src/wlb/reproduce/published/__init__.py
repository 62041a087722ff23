"""The simulator held against measurements that others published: kernels, whole steps, and batches document by document."""
