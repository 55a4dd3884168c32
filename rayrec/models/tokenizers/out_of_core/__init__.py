"""Item vectors and codes of catalogs that no process holds: files by blocks of items, and tasks over them.

Start at `catalog.tokenize_blocks`; `components.interaction_rows` makes vectors of co-occurrence.
Sums are taken block by block and added in the order of the blocks, by one thread each: neither the number of
processes nor how many blocks a task takes changes a bit.
"""
