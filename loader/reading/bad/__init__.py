"""What cannot be read, decoded or transformed: counted, recorded, replaced."""
