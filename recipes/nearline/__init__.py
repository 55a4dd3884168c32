"""Instructions for a recommender, written by a language model before users ask."""
