"""Late copies: values that are copied when their batch is due; until then only their places are known."""
