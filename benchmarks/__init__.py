"""What measures the claims."""
