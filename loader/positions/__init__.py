"""Where a loader stands, and how far it may go on."""
