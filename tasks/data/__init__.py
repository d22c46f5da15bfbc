"""Rows in, token ids and learnt positions out; and the order in which samples are seen."""
