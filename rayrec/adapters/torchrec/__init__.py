"""RayRec's tables under a model written against torchrec's `EmbeddingBagCollection` or `EmbeddingCollection`.

    adapted = adapt(model)                    its collections take rows from outside from now on
    tables = table_configs(adapted.tables)    for servers and lookup modes

    step t   batch = split_kjt(kjt, adapted.tables)    distinct ids by table
             rows = lookups.rows(t, batch.lookups)     from the servers
             with adapted.using(batch, rows) as gradients:
                 model(dense, kjt).backward()
             lookups.update(t, batch.lookups, gradients.by_table())

torchrec is needed here and nowhere else.
"""

try:
    import torchrec as _torchrec
except ImportError as error:
    raise ImportError(
        "rayrec.adapters.torchrec needs torchrec, which cannot be imported here "
        f"({error}); install it with: pip install 'rayrec[torchrec]' and then "
        "pip install --no-deps torchrec==1.8.0, since by itself it would bring the CUDA build of fbgemm-gpu"
    ) from error

from rayrec.adapters.torchrec.lookups import KjtLookups, split_kjt, split_shares
from rayrec.adapters.torchrec.modules import AdaptedModel, RowGradients, adapt
from rayrec.adapters.torchrec.tables import TableSpec, expected_rows, table_configs, table_specs

del _torchrec

__all__ = [
    "AdaptedModel",
    "KjtLookups",
    "RowGradients",
    "TableSpec",
    "adapt",
    "expected_rows",
    "split_kjt",
    "split_shares",
    "table_configs",
    "table_specs",
]
