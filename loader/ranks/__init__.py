"""The ranks that share out the data: which one this is, what all are told, and what each reads of a cut model."""
