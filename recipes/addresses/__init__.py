"""Free text to a hierarchy of segments that rebuild it."""
