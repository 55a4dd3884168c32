"""Models that were written against other libraries, on RayRec's tables. No Ray in here."""
