"""From encoded images to pixels, on the CPU and on a device."""
