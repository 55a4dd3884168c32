"""From a request to an answer: batching, versions, compilation, degradation.

Start at `service.RecommendationService`.
May import `events` and what is below it.
"""
