"""What keeps documents and finds passages in them."""
