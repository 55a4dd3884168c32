"""Ranking models: how likely is it that what is shown is clicked, liked, bought."""
