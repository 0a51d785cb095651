"""`python -m mxfp8.dispatch`: the table of ops and backends for this machine."""

from rich.console import Console
from rich.table import Table

from mxfp8.dispatch import explain

rows = explain()
table = Table(title=f"mxfp8 backends on {rows[0].device}")
for name in ("op", "backend", "available", "reason"):
    table.add_column(name, no_wrap=name == "op")
for row in rows:
    table.add_row(row.op, row.backend, "yes" if row.available else "no", row.reason)
Console(width=max(110, Console().width)).print(table)
