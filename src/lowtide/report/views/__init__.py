"""Views of reports: terminal, HTML page, notebook, PNG and JSON.

They are reached through the methods of `MemoryReport` and `MemoryDiff`; nothing here is called by name from outside.
"""

__all__: list[str] = []
