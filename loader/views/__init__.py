"""Views of a data set beside training: one sample, the first batch, tables for notebooks. Nothing is consumed."""
