"""Shared tables: the peers of a run hold the rows of its tables, and push gradients to each other.

Read `view`, `keeper` and `node`, in this order.
"""
