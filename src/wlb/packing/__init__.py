"""Packers turn a stream of documents into ``StepPlan``s; ``balance`` divides a given set of documents.

Importing this package imports nothing, so ``wlb.packing.balance`` needs only NumPy and runs in any trainer.
"""
