"""Learners that train apart, and exchange what their weights have changed by."""
