"""Several processes may compile at once, into one cache of numba's. Importing this makes that safe; knows nothing else.

numba numbers a function's files of machine code by what its index holds at that moment, and locks nothing: of two processes that save two
variants at the same time, one may find the other's code under its own name. So no two files ever have the same name; what can be lost is an
entry of the index, which is then compiled again.
"""

from __future__ import annotations

import uuid

from numba.core.caching import IndexDataCacheFile


def _data_name(file: IndexDataCacheFile, _number: int) -> str:
    base = str(vars(file)["_index_name"]).removesuffix(".nbi")
    return f"{base}.{uuid.uuid4().hex[:16]}.nbc"


setattr(IndexDataCacheFile, _data_name.__name__, _data_name)
