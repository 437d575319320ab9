"""Views of reports: terminal, HTML page, notebook, PNG and JSON.

Methods of `MemoryReport` and `MemoryDiff` call them; the page of a run is `report.run_page`.
"""
