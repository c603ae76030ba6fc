"""Which sample comes when: arithmetic alone, without I/O."""
