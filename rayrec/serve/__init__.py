"""Trained models as a service.

Start at `launch.launch.serving`; `engine.service.RecommendationService` answers.
May import `pipelines` and what is below it.
"""
