"""One evaluation: its batches, modes and metrics."""
