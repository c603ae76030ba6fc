"""Values that are copied when their batch is due; until then it is known where they lie."""
