"""The threads between the plan and the caller, and the way to the device."""
