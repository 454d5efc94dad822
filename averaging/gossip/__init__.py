"""Exchanges between pairs of peers, whenever two are free."""
