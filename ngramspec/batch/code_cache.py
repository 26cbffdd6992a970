"""Several processes may compile at once, into one cache of numba's. Importing this makes that safe; knows nothing else.

numba numbers a function's files of machine code by what its index holds at that moment, and locks nothing: of two processes that save two
variants at the same time, one may find the other's code under its own name. So a file's name tells the process, too; what can be lost is
an entry of the index, which is then compiled again.
"""

from __future__ import annotations

import os

from numba.core.caching import IndexDataCacheFile


def _data_name(file: IndexDataCacheFile, number: int) -> str:
    base = str(vars(file)["_index_name"]).removesuffix(".nbi")
    return f"{base}.{os.getpid():x}-{number}.nbc"


setattr(IndexDataCacheFile, _data_name.__name__, _data_name)
