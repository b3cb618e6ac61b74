"""The steps of a training, as the user's loop makes them."""
