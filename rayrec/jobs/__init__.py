"""Jobs of several teams on one Ray cluster: queues with guarantees, admission, reclaim.

Its core is arithmetic without Ray, files or a clock (`queues`, `quota`, `cells`, `job`, `admission`,
`reclaim`, `simulation`); what keeps and runs jobs stands around it. Imports `platform` and `pipelines`.
"""
