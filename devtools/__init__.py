"""Tools of developers: faults, fuzzing, leaks, equality and single measurements. ``python -m devtools`` lists them.

They run in the root of a checkout, where the processes that they start find them, too, and are no part of the wheel.
"""
