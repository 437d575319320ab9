"""Views of reports: terminal, HTML page, notebook, PNG and JSON.

They are reached through the methods of `MemoryReport` and `MemoryDiff`, and that of a run as `report.run_page`.
"""

__all__: list[str] = []
