"""What happens between steps: when to evaluate, save, go back, stop."""
