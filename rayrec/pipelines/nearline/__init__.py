"""Near-line products: what is computed of a user seconds after an event, for answers that come later.

Start at `worker.NearlineWorker`; `products` says what is kept, `product_store` where.
May import `versions` and what is below it.
"""
