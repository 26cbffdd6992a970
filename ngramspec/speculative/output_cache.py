"""The output cache: n-gram tables of what each tenant's finished requests wrote, which its later requests draft from.

Finished outputs enter; the row of a tenant's tables leaves, for compiled code to look up. Knows no running sequence.
"""

from __future__ import annotations

import numpy as np

from ngramspec.speculative.ngram_table import TablePool, append_tokens, has_room_for

# Tenants that have tables; the least recently used one gives way.
TENANTS = 16


class OutputCache:
    """The latest `size` tokens of each tenant's outputs (0: of none), in tables with these contexts [K] int32."""

    def __init__(self, size: int, contexts: np.ndarray) -> None:
        self._contexts = contexts
        self.tables = TablePool(1 + (TENANTS if size else 0), max(size, 16), len(contexts))
        self.tables.allocate(0, cap=2, entries=1)  # row 0: empty tables, for sequences without a tenant
        self._rows: dict[str, int] = {}

    def find_row(self, tenant: str | None) -> int:
        """Return the row of a tenant's tables; 0 if it has none."""
        return 0 if tenant is None else self._rows.get(tenant, 0)

    def add(self, output: np.ndarray, tenant: str) -> int:
        """Add a finished output [n] int32 to a tenant's tables. Return the row if it was taken from another tenant, else 0."""
        tables, taken = self.tables, 0
        if len(tables.buffers) == 1 or len(self._contexts) == 0:
            return 0
        row = self._rows.pop(tenant, 0)
        if not row:
            row = next((i for i in range(1, len(tables.buffers)) if tables.buffers[i] is None), 0)
            if not row:
                row = taken = self._rows.pop(next(iter(self._rows)))
            tables.allocate(row, cap=1024, entries=1024 * (len(self._contexts) + 1))
        self._rows[tenant] = row
        output = np.append(np.asarray(output, np.int32), np.int32(-1))  # -1: contexts do not reach from one output into the next
        output = output[-tables.history :]
        if not has_room_for(tables.states[row], self._contexts, tables.history, len(output)):
            tables.enlarge_buffer(row, len(output), self._contexts)
        append_tokens(tables.states[row], self._contexts, output, tables.history)
        return taken
