"""`penstock report`: a run's records as one HTML page."""
