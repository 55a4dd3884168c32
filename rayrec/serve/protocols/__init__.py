"""Other protocols than our own: Open Inference v2, OpenAI-style completions.

Start at `open_inference` and `completions`.
May import `admission` and what is below it.
"""
