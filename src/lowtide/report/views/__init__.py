"""Views of reports: terminal, HTML page, notebook, PNG and JSON.

Methods of `MemoryReport` and `MemoryDiff` make these views. `report.run_page` makes the page of a training run.
"""
