"""Orders and shares by what samples cost."""
