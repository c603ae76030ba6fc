"""`penstock top`: what each rank tells of itself while it runs."""
