"""Hosts that are namespaces of one machine, the network between them, and what jobs on them do when it is cut."""
