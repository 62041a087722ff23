"""Packers turn a stream of documents into ``StepPlan``s; ``balance`` divides a given set of documents.

Nothing is imported here, so that ``wlb.packing.balance`` needs NumPy alone: it is for trainers that have little else.
"""
