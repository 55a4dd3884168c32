"""Networks that read a history."""
