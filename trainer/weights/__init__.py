"""Weights that come from elsewhere and go elsewhere: warm starts and exports."""
